"""Versions in memory that trainer and engine share: whole, or refused."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.core.endpoints import is_own_address
from services.core.machine import memory_directory, memory_of_run, remove_memory
from services.weights.shared_tensors import BucketError, FilePart, SharedMemory, pack_bucket, unpack_bucket

STATE = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.tensor([-1.0]),
    "c": torch.randn(3, 1, generator=torch.Generator().manual_seed(0)),
}
SIZE = sum(value.nbytes for value in STATE.values())
FILE = memory_directory() / f"grpo-test-{os.getpid()}"


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory(FILE, SIZE)
    yield made
    made.remove()


def fill(memory: SharedMemory, version: int, factor: float = 1.0) -> bytes:
    memory.begin()
    state = {name: memory.copy_of(value * factor) for name, value in STATE.items()}
    return pack_bucket(memory.finish(version), state)


def test_another_process_reads_the_tensors(memory: SharedMemory) -> None:
    packed = fill(memory, 3)
    if (child := os.fork()) == 0:
        read = unpack_bucket(packed).tensors
        os._exit(0 if [*read] == [*STATE] and all(torch.equal(read[name], STATE[name]) for name in STATE) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_version_that_is_written_over_is_noticed(memory: SharedMemory, is_finished: bool) -> None:
    packed = fill(memory, 3)
    bucket = unpack_bucket(packed)
    assert bucket.is_intact()
    fill(memory, 4, 2.0) if is_finished else memory.begin()
    assert not bucket.is_intact()
    with pytest.raises(BucketError, match="does not hold policy version 3"):
        unpack_bucket(packed)


def test_who_reads_changes_nothing(memory: SharedMemory) -> None:
    packed = fill(memory, 3)
    unpack_bucket(packed).tensors["a"].zero_()
    assert torch.equal(unpack_bucket(packed).tensors["a"], STATE["a"])


def test_the_memory_of_another_host_is_not_there(memory: SharedMemory) -> None:
    packed = fill(memory, 3)
    bucket = unpack_bucket(packed)
    memory.remove()
    assert torch.equal(bucket.tensors["a"], STATE["a"]), "who has mapped it keeps it"
    with pytest.raises(BucketError, match=r"does not exist; do trainer and engine run on the same host\?"):
        unpack_bucket(packed)


def test_only_files_in_memory_are_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(100))
    for name in (str(tmp_path / "secret"), "../secret", ".."):
        with pytest.raises(BucketError, match="cannot be read"):
            unpack_bucket(pack_bucket(FilePart(name, 0, 8), {"a": torch.zeros(2)}))


def test_nothing_of_a_pickle_is_executed() -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("true",)

    with pytest.raises(BucketError, match="is not allowed"):
        unpack_bucket(pickle.dumps({"flattened_tensor": Attack(), "metadata": []}))
    with pytest.raises(BucketError):
        unpack_bucket(b"no pickle")


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot reserve the room of a file")
def test_memory_that_is_not_there_is_an_error_and_leaves_no_file() -> None:
    with pytest.raises(OSError, match="No space left"):
        SharedMemory(FILE, 2 * shutil.disk_usage(FILE.parent).total)
    assert not FILE.exists()


def test_the_memory_of_a_trainer_that_was_killed_is_replaced() -> None:
    if (child := os.fork()) == 0:
        SharedMemory(FILE, SIZE).begin()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    memory = SharedMemory(FILE, SIZE)
    try:
        assert torch.equal(unpack_bucket(fill(memory, 5)).tensors["c"], STATE["c"])
    finally:
        memory.remove()


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_a_name_that_somebody_made_first_stops_no_run(kind: str, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    path = memory_of_run(policy)
    path.mkdir() if kind == "directory" else path.symlink_to(tmp_path / "elsewhere")
    try:
        memory = SharedMemory(path, SIZE)
        assert torch.equal(unpack_bucket(fill(memory, 5)).tensors["c"], STATE["c"])
    finally:
        remove_memory(policy)
    assert not list(path.parent.glob(f"{path.name}*"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_host_knows_its_own_addresses() -> None:
    assert is_own_address("127.0.0.1")
    assert is_own_address("localhost")
    assert not is_own_address("192.0.2.1")  # an address for documents
    assert not is_own_address("no-such-host.invalid")
