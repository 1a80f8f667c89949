from __future__ import annotations

import contextlib
import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from services.core import files
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.problems import ProblemError
from services.protocol.groups import Group
from services.protocol.replay import FlatExperience, SampleExperiencesRequest
from services.replay_buffer import store
from services.replay_buffer.app import create_app
from services.replay_buffer.database import Database
from services.replay_buffer.settings import ReplaySettings
from tests.waiting import eventually


def test_adding_a_known_id_again_changes_nothing(buffer: Any, group: Any) -> None:
    parts = buffer()
    assert parts.store.add([group("a"), group("b")], [1.0, 2.0]).added == 2
    again = parts.store.add([group("a", prompt="another"), group("c"), group("c")], [9.0, 3.0, 4.0])
    assert (again.added, again.duplicates, again.size) == (1, 2, 3)
    assert parts.stored() == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert parts.group("a")["prompt"]["prompt"] == "2 + 2?"
    # Not even after it has left, or waits in the queue.
    parts = buffer(capacity=1)
    parts.store.add([group("d")], None)
    assert parts.stored().keys() == {"d"}
    assert parts.store.add([group("a")], None).duplicates == 1
    assert parts.queue.enqueue([group("d"), group("e")], None).added == 1
    assert parts.store.add([group("e")], None).duplicates == 1


def test_a_group_without_a_priority_gets_the_highest(buffer: Any, group: Any) -> None:
    parts = buffer()
    parts.store.add([group("a")], None)
    parts.store.add([group("b"), group("c")], [5.0, 0.0])
    parts.store.add([group("d")], None)
    assert parts.stored() == {"a": 1.0, "b": 5.0, "c": 0.0, "d": 5.0}


def test_groups_are_drawn_by_priority_or_uniformly(buffer: Any, group: Any) -> None:
    parts = buffer()
    parts.store.add([group(f"g{i}", version=i) for i in range(10)], [0.0] * 9 + [1.0])
    assert parts.sample(4, exponent=1.0) == ["g9"]
    assert sorted(parts.sample(20, exponent=0.0)) == [f"g{i}" for i in range(10)]
    assert set(parts.sample(20, exponent=0.0, min_policy_version=7)) == {"g7", "g8", "g9"}
    assert parts.sample(3, exponent=0.0, seed=1) == parts.sample(3, exponent=0.0, seed=1)
    assert [parts.sample(3, exponent=0.0) for _ in range(5)] != [parts.sample(3, exponent=0.0)] * 5


def test_beyond_the_capacity_the_oldest_leave_with_their_contents(buffer: Any, group: Any) -> None:
    parts = buffer(capacity=5)
    parts.store.add([group(f"g{i}") for i in range(4)], None)
    parts.store.add([group(f"h{i}") for i in range(3)], None)
    assert list(parts.stored()) == ["g2", "g3", "h0", "h1", "h2"]
    parts.store.add([group(f"i{i}") for i in range(9)], None)
    assert list(parts.stored()) == [f"i{i}" for i in range(4, 9)]
    assert parts.store.counts["evicted"] == 11
    assert parts.contents() == 5


def test_experiences_without_tokens_live_beside_the_groups(
    buffer: Any, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "EXPERIENCE_CAPACITY", 4)
    parts = buffer()
    parts.store.add([group("a")], None)
    flat = [FlatExperience(prompt=f"p{i}", response="r", reward=i, step=i) for i in range(6)]  # type: ignore[call-arg]
    assert parts.store.add_experiences(flat).size == 4
    for reopened in (False, True):
        if reopened:
            parts = buffer()
        drawn = orjson.loads(parts.store.sample_experiences(SampleExperiencesRequest(batch_size=9)))["experiences"]
        assert sorted(e["step"] for e in drawn) == [2, 3, 4, 5]
        assert parts.sample(9) == ["a"]
    assert parts.contents() == 5


def test_a_priority_of_its_own_wins_over_the_reward(buffer: Any) -> None:
    parts = buffer()
    flat = [
        FlatExperience(prompt="never", response="", reward=5.0, priority=0),  # type: ignore[call-arg]
        FlatExperience(prompt="sometimes", response="", reward=0.0, priority="high"),  # type: ignore[call-arg]
    ]
    parts.store.add_experiences(flat)
    drawn = orjson.loads(parts.store.sample_experiences(SampleExperiencesRequest(batch_size=9)))["experiences"]
    assert [e["prompt"] for e in drawn] == ["sometimes"]


def test_a_write_that_fails_changes_nothing(buffer: Any, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = buffer()
    parts.store.add([group("a")], None)

    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "executemany", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            parts.store.add([group("b", version=9), group("c")], [5.0, 5.0])
    assert (list(parts.stored()), parts.sample(9), parts.store.groups.newest_version()) == (["a"], ["a"], 1)
    assert parts.contents() == 1
    assert parts.store.add([group("b")], None).added == 1
    assert parts.stored() == {"a": 1.0, "b": 1.0}
    parts = buffer()
    assert list(parts.stored()) == ["a", "b"]
    assert parts.store.database.execute("PRAGMA synchronous").fetchone() == (2,), "through a loss of power, too"


def test_the_file_grows_as_needed_up_to_what_is_allowed(buffer: Any, group: Any) -> None:
    parts = buffer(max_bytes=4 * 2**20)
    added = 0

    def fill() -> None:
        nonlocal added
        for added in range(100):
            parts.store.add([group(f"g{added}", tokens=10_000)], None)

    before = parts.store.database.used_bytes
    with pytest.raises(ProblemError, match="all that is allowed") as refusal:
        fill()
    assert refusal.value.status_code == 507
    assert before < parts.store.database.used_bytes <= 4 * 2**20
    assert len(parts.stored()) == added > 10
    assert parts.sample(1)
    # With a lower limit than what the groups take already, changes that need no more room go on.
    parts = buffer(max_bytes=2**20)
    assert parts.store.update_priorities({"g1": 3.0}).updated == 1
    parts = buffer(max_bytes=2**20, capacity=5)
    assert parts.store.add([group("small")], None).size == 5


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbstractContextManager[None]]:
    """``with full_disk(store, how)``: the buffer's files take no more, as ``how`` says, until the block ends."""

    @contextmanager
    def filled(store: Any, how: str) -> Iterator[None]:
        store.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        # The first ends a write in the middle, as a full disk does; the second lets none begin.
        limit = 10_000 if how == "a part is written" else 0
        monkeypatch.setattr(files, "FULL_BELOW_BYTES", 2**63)
        with files_no_larger_than(limit):
            yield

    return filled


@contextmanager
def files_no_larger_than(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("how", ["a part is written", "no larger file"])
def test_a_full_disk_is_told_and_loses_nothing(buffer: Any, group: Any, full_disk: Any, how: str) -> None:
    parts = buffer()
    parts.store.add([group("a")], None)
    parts.queue.enqueue([group("b")], None)
    directory = parts.store.settings.directory
    with full_disk(parts.store, how):
        with pytest.raises(ProblemError) as refusal:
            parts.store.add([group("c", tokens=100_000)], None)
        assert refusal.value.status_code == 507
        assert str(directory) in refusal.value.detail
        assert (list(parts.stored()), parts.waiting()) == (["a"], ["b"])
        assert parts.sample(1) == ["a"]
    assert parts.store.add([group("c", tokens=100_000)], None).added == 1
    parts = buffer()
    assert (list(parts.stored()), parts.waiting()) == (["a", "c"], ["b"])


def test_a_broken_disk_is_not_called_full(
    buffer: Any, group: Any, full_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = buffer()
    with full_disk(parts.store, "a part is written"):
        monkeypatch.setattr(files, "FULL_BELOW_BYTES", 0)
        with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
            parts.store.add([group("a", tokens=100_000)], None)
    assert parts.store.add([group("a", tokens=100_000)], None).added == 1


def test_a_directory_in_use_is_refused(buffer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.http.database.LOCK_SECONDS", 0.1)
    parts = buffer()
    with pytest.raises(DependencyLostError, match=str(parts.store.settings.directory)):
        store.Store(parts.store.settings)


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "replay-buffer.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigurationError, match="REPLAY_DIR"):
        store.Store(ReplaySettings(replay_dir=tmp_path))


def test_a_buffer_of_an_earlier_format_is_refused(buffer: Any, tmp_path: Path) -> None:
    (tmp_path / "replay").mkdir()
    with contextlib.closing(sqlite3.connect(tmp_path / "replay/replay-buffer.sqlite")) as database:
        database.execute("CREATE TABLE contents (sequence INTEGER PRIMARY KEY, data BLOB)")
    with pytest.raises(ConfigurationError, match="format is 0"):
        buffer()


# --- a damaged database ----------------------------------------------------------------------------------------------


ASK = {"batch_size": 40}


@pytest.fixture
async def directory(serving: Any, group: Callable[..., Group], tmp_path: Path) -> Path:
    """The directory of a replay buffer that held some groups and ended."""
    where = tmp_path / "replay"
    async with serving(create_app(ReplaySettings(replay_dir=where))) as client:
        for number in range(40):
            made = group(f"g{number}", tokens=2000).model_dump(mode="json")
            route = "/groups" if number % 2 else "/queue"
            assert (await client.post(route, json={"groups": [made]})).status_code == 200
    return where


async def test_half_a_database_fails_the_service_once_it_shows(directory: Path) -> None:
    file = directory / "replay-buffer.sqlite"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    app = create_app(ReplaySettings(replay_dir=directory))
    lifecycle = app.state.lifecycle
    async with app.router.lifespan_context(app):
        await eventually(lambda: lifecycle.ready.is_set() or lifecycle.failure is not None)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replay") as client:
            await client.post("/groups/sample", json=ASK)
    assert isinstance(lifecycle.failure, ConfigurationError)
    assert str(directory) in str(lifecycle.failure)
