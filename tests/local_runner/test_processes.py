"""The local runner's measurement of its processes' memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from local_runner.processes import MARK, MemoryMeter
from tests.waiting import IDLE_SECONDS

MEGABYTE = 1_000_000

HOLDS_AND_FORKS = """
import os, sys
held = bytearray(os.urandom(1)) * 100_000_000
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print("ready", flush=True)
sys.stdin.read()
os.wait()
"""


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    """Two processes of one node that share 100 MB."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_AND_FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {MARK: "run/some-task-0"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


@pytest.mark.skipif(not psutil.LINUX, reason="only Linux tells what processes share")
def test_memory_that_processes_share_counts_once_and_the_peak_stays(family: subprocess.Popen[str]) -> None:
    # Other tests of this process may have left children of their own, without a node.
    meter, later = MemoryMeter(), MemoryMeter()
    meter.measure()
    peak = meter.peak_by_node["some-task-0"]
    assert 100 * MEGABYTE < peak < 150 * MEGABYTE
    assert meter.peak >= peak
    family.communicate(timeout=IDLE_SECONDS)
    for one in (meter, later):
        one.measure()
    assert meter.peak_by_node["some-task-0"] == peak
    assert "some-task-0" not in later.peak_by_node
