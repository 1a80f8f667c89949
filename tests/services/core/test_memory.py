"""The memory of a container; freed memory, kept or returned as asked, in a process of its own for each test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.core import memory

MIB = 2**20
# Blocks that glibc would give back at once, below and above what is kept.
PROGRAM = """
import psutil
from services.core import memory

def resident():
    return psutil.Process().memory_info().rss

{before}
at_first = resident()
blocks = [bytearray(b"x" * {size}) for _ in range({count})]
filled = resident()
del blocks
freed = resident()
memory.release()
print(filled - at_first, freed - at_first, resident() - at_first)
"""


def grown(before: str, size: int, count: int) -> tuple[int, int, int]:
    """Bytes by which a process has grown: with its blocks, when they are freed, and after ``release``."""
    code = PROGRAM.format(before=before, size=size, count=count)
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    filled, freed, released = map(int, output.split())
    return filled, freed, released


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the C library is asked for this on Linux only")


def test_what_is_freed_is_kept_until_it_is_released() -> None:
    filled, freed, released = grown("memory.keep()", 40 * MIB, 4)
    assert filled > 150 * MIB
    assert freed > 150 * MIB
    assert released < 20 * MIB


@pytest.mark.parametrize(("before", "size"), [("", 40 * MIB), ("memory.keep()", 80 * MIB)], ids=["by default", "large"])
def test_otherwise_it_goes_back_at_once(before: str, size: int) -> None:
    filled, freed, _ = grown(before, size, 2)
    assert filled > 1.9 * size
    assert freed < 0.5 * size


def test_a_containers_limit_counts_where_it_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP_FILES", (tmp_path / "another", limit))
    machine = memory.host_memory()
    limit.write_text("1000000\n")
    assert memory.host_memory() == 1000000
    limit.write_text("max\n")
    assert memory.host_memory() == machine > 1000000
