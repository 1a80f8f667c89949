"""A group for broadcasts of weights over NCCL on the pretended device: torch does not watch it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.cuda

# In a process of its own: torch's first NCCL group starts threads that only the end of the process stops.
PROGRAM = """
import os
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from services.weights.broadcast_group import join_weights_group
from tests.ports import free_port


def watchdogs() -> int:
    return sum(path.read_text().strip() == "pt_nccl_watchdg" for path in Path("/proc/self/task").glob("*/comm"))


def settled(at_least: int) -> int:
    deadline = time.monotonic() + 30
    while watchdogs() < at_least and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    return watchdogs()


store = dist.PrefixStore("ranks", HashStore())
dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=store, timeout=timedelta(seconds=60))
before = settled(1)
join_weights_group("127.0.0.1", free_port(), 0, 1, "weights", "nccl", 5.0)
print(before, settled(before), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def counts() -> tuple[int, int]:
    """The watchdog threads of a process with its default group, and those once it has joined a weights group."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split()[-2:])
    return before, after


def test_a_weights_group_has_no_watchdog_that_could_end_the_trainer(counts: tuple[int, int]) -> None:
    before, after = counts
    assert before == 1, "torch watches the trainer's own group"
    assert after == before
