from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.protocol.groups import Group, unpack
from services.protocol.replay import LeaseRequest, SampleGroupsRequest, unframed
from services.replay_buffer import database, store
from services.replay_buffer.fresh_queue import FreshQueue
from services.replay_buffer.settings import ReplaySettings
from services.replay_buffer.store import Store
from tests.sequences import make_group


class Clock:
    """A clock that stands still unless told otherwise."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Parts:
    """A buffer, without HTTP."""

    store: Store
    queue: FreshQueue

    def sample(self, count: int, **options: Any) -> list[str]:
        reply = unframed(self.store.sample(SampleGroupsRequest(batch_size=count, **options)))
        return [drawn["group"]["group_id"] for drawn in reply["groups"]]

    def lease(self, count: int, **options: Any) -> tuple[str | None, list[str]]:
        reply = self.queue.lease(LeaseRequest(max_groups=count, **options), take_fewer=True)
        assert reply is not None
        read = unframed(reply)
        return read["lease_id"], [group["group_id"] for group in read["groups"]]

    def waiting(self) -> list[str]:
        rows = self.store.database.execute(
            "SELECT group_id FROM known JOIN members USING (sequence) "
            "WHERE place = 'queue' AND lease IS NULL ORDER BY sequence"
        )
        return [group_id for (group_id,) in rows]

    def stored(self) -> dict[str, float]:
        """Priorities by group id, in order of arrival, as the database has them."""
        rows = self.store.database.execute(
            "SELECT group_id, priority FROM known JOIN members USING (sequence) WHERE place = 'store' ORDER BY position"
        )
        return dict(rows.fetchall())

    def group(self, group_id: str) -> dict[str, Any]:
        """A group in the store or the queue, as the database has it."""
        (data,) = self.store.database.execute(
            "SELECT data FROM known JOIN members USING (sequence) JOIN contents USING (sequence) WHERE group_id = ?",
            (group_id,),
        ).fetchone()
        read: dict[str, Any] = unpack(data).model_dump(mode="json")
        return read

    def contents(self) -> int:
        """The number of records whose contents are on disk."""
        count: int = self.store.database.execute("SELECT count(*) FROM contents").fetchone()[0]
        return count


OpenBuffer = Callable[..., Parts]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def buffer(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenBuffer]:
    """``buffer(capacity=10)``: opens the buffer in the test's directory, closing the one opened before."""
    opened: list[Store] = []

    def open_buffer(
        directory: Path = tmp_path, capacity: int = store.CAPACITY, max_bytes: int = database.MAX_BYTES
    ) -> Parts:
        monkeypatch.setattr(store, "CAPACITY", capacity)
        monkeypatch.setattr(database, "MAX_BYTES", max_bytes)
        while opened:
            opened.pop().database.close()
        made = Store(ReplaySettings(replay_dir=directory / "replay"), clock=clock)
        opened.append(made)
        return Parts(made, FreshQueue(made))

    yield open_buffer
    while opened:
        opened.pop().database.close()


@pytest.fixture
def group() -> Callable[..., Group]:
    def make(name: str, version: int = 1, *, tokens: int = 3, completions: int = 2, prompt: str = "2 + 2?") -> Group:
        experience = {
            "completion": "4",
            "completion_ids": list(range(tokens)),
            "logprobs": [-0.25 * (i + 1) for i in range(tokens)],
            "policy_versions": [version] * tokens,
            "finish_reason": "stop",
            "result": {"reward": 1.0},
        }
        return make_group(
            group_id=name,
            prompt=prompt,
            ground_truth="4",
            prompt_ids=[1, 2],
            sequences=[experience] * completions,
        )

    return make
