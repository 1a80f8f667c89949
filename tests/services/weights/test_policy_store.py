"""Published policy versions on a directory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from services.weights.policy_store import PolicyStore, PublishedPolicy

HOLD_SECONDS = 600.0


@pytest.fixture
def store(tmp_path: Path) -> PolicyStore:
    return PolicyStore(tmp_path / "policy")


def publish(store: PolicyStore, version: int, text: str = "") -> Path:
    directory = store.begin(version)
    (directory / "weights").write_text(text or str(version))
    return store.commit(version)


def test_a_version_is_visible_once_it_is_committed(store: PolicyStore) -> None:
    directory = store.begin(3)
    (directory / "weights").write_text("half")
    assert store.newest() is None
    path = store.commit(3)
    assert store.newest() == PublishedPolicy(3, path)
    assert (path / "weights").read_text() == "half"


def test_what_an_interrupted_writer_left_is_not_part_of_the_next_attempt(store: PolicyStore) -> None:
    (store.begin(1) / "left over").write_text("")
    path = publish(store, 1)
    assert [file.name for file in path.iterdir()] == ["weights"]


def test_the_newest_are_kept(store: PolicyStore) -> None:
    for version in range(1, 6):
        publish(store, version)
    store.prune(2, HOLD_SECONDS)
    assert [policy.version for policy in store.published()] == [4, 5]
    assert len(list(store.policy_dir.iterdir())) == 2


def test_what_is_held_is_not_pruned_until_it_is_released(store: PolicyStore) -> None:
    for version in range(1, 4):
        publish(store, version)
    holds = [store.hold(1), store.hold(1)]
    for hold in holds:
        store.prune(1, HOLD_SECONDS)
        assert [policy.version for policy in store.published()] == [1, 3]
        store.release(hold)
    store.prune(1, HOLD_SECONDS)
    assert [policy.version for policy in store.published()] == [3]
    assert len(list(store.policy_dir.iterdir())) == 1


def test_what_a_reader_that_died_held_is_pruned_in_time(store: PolicyStore) -> None:
    for version in (1, 2):
        publish(store, version)
    long_ago = time.time() - HOLD_SECONDS - 1
    os.utime(store.hold(1), (long_ago, long_ago))
    store.prune(1, HOLD_SECONDS)
    assert [policy.version for policy in store.published()] == [2]
    assert len(list(store.policy_dir.iterdir())) == 1


def test_a_version_that_is_gone_cannot_be_held(store: PolicyStore) -> None:
    publish(store, 2)
    with pytest.raises(FileNotFoundError, match="version 1 was pruned"):
        store.hold(1)
    assert len(list(store.policy_dir.iterdir())) == 1


def test_versions_after_a_checkpoint_are_discarded(store: PolicyStore) -> None:
    for version in range(1, 5):
        publish(store, version)
    store.begin(4)
    store.discard_after(2)
    assert [policy.version for policy in store.published()] == [1, 2]
    assert store.newest_begun() == 2, "nobody waits for a version whose writer was killed"


@pytest.mark.parametrize("ending", ["removed", "replaced"])
def test_what_a_process_left_that_died_while_it_removed_a_version_is_discarded(store: PolicyStore, ending: str) -> None:
    publish(store, 1)
    (publish(store, 2)).rename(store.policy_dir / f".v000002.{ending}")
    store.discard_after(1)
    assert [path.name for path in store.policy_dir.iterdir()] == ["v000001"]


def test_a_reader_never_sees_half_a_version(store: PolicyStore) -> None:
    stop = threading.Event()
    broken: list[str] = []

    def read() -> None:
        while not stop.is_set():
            newest = store.newest()
            if newest is None:
                continue
            try:
                text = (newest.path / "weights").read_text()
            except FileNotFoundError:  # pruned meanwhile
                continue
            if text != str(newest.version):
                broken.append(text)

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(1, 40):
        publish(store, version)
        store.prune(1, HOLD_SECONDS)
    stop.set()
    reader.join()
    assert broken == []
