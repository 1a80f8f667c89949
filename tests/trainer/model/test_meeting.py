"""Ranks meet before their first collective: missing GPUs, and ranks that differ, end the run with a message."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

import trainer.__main__ as program
import trainer.run  # noqa: F401  (main imports it, which takes seconds)
from services.core.errors import EXIT_CONFIGURATION, ConfigurationError
from tests.trainer.processes import run_on_ranks
from trainer.model import ranks
from trainer.model.ranks import Ranks

CPU = {"device": "cpu", "backend": "gloo", "torch": "2.14.1", "host": "a"}
GPU = CPU | {"device": "cuda", "backend": "cpu:gloo,cuda:nccl", "host": "b"}


@pytest.mark.parametrize("rank", [{}, {"RANK": "0", "WORLD_SIZE": "1"}], ids=["launcher", "rank"])
def test_a_trainer_whose_gpus_are_missing_ends_instead_of_training_on_the_processor(
    rank: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    variables = {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "SHARED_DIR": str(tmp_path), "RUN_ID": "r", **rank}
    monkeypatch.setattr(os, "environ", os.environ | variables)
    monkeypatch.setattr(program, "kill_stale_processes", lambda: None)
    assert program.main() == EXIT_CONFIGURATION
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: SKYPILOT_NUM_GPUS_PER_NODE is 8, but torch sees 0 CUDA devices"), last


def test_a_node_whose_gpus_are_there_has_a_rank_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(program, "check_tools", lambda: None)
    assert program.ranks_per_node() == 4


def test_ranks_that_differ_end_with_a_message() -> None:
    store = HashStore()
    store.set("facts/1", '{"device": "cuda", "backend": "cpu:gloo,cuda:nccl", "torch": "2.14.1", "host": "b"}')
    with pytest.raises(ConfigurationError, match=r"differ in their device .rank 0 on a: cpu, rank 1 on b: cuda."):
        ranks.compare(store, 0, 2, CPU)
    with pytest.raises(ConfigurationError, match=r"differ in their torch .rank 0 on b: 2.13.0, rank 1 on b: 2.14.1"):
        ranks.compare(store, 0, 2, GPU | {"torch": "2.13.0"})


def test_ranks_on_different_gpus_may_compute_together() -> None:
    store = HashStore()
    other = threading.Thread(target=ranks.compare, args=(store, 1, 2, GPU | {"host": "c"}))
    other.start()
    ranks.compare(store, 0, 2, GPU)
    other.join()


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MEETING_SECONDS", 0.2)
    with pytest.raises(dist.DistStoreError, match=r"ranks \[1, 2\] did not join within 0.2 s"):
        ranks.compare(HashStore(), 0, 3, CPU)


def wait_longer_than_a_collective_may(joined: Ranks) -> int:
    # Collectives of this group time out after COLLECTIVE_SECONDS.
    backend = distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=1))
    try:
        if joined.is_main:
            time.sleep(2.5)
        value: int = joined.broadcast_json(7)
    finally:
        backend._set_default_timeout(timedelta(seconds=ranks.COLLECTIVE_SECONDS))
    return value


def test_rank_0_may_take_longer_between_collectives_than_a_collective_may() -> None:
    assert ranks.COLLECTIVE_SECONDS <= 15 * 60
    assert run_on_ranks(2, wait_longer_than_a_collective_may) == [7, 7]
