"""A full disk: telling it from a broken one, and saying how much is free."""

from __future__ import annotations

import shutil
from pathlib import Path

# A write that stopped half-way leaves less than it wanted, and others may have freed a little since.
FULL_BELOW_BYTES = 64 * 2**20


def is_full(directory: Path) -> bool:
    """Return whether so little is free on the disk of ``directory`` that a write may have failed for lack of space."""
    return shutil.disk_usage(directory).free < FULL_BELOW_BYTES


def free_space(directory: Path) -> str:
    """Return how much is free on the disk of ``directory``, in words."""
    usage = shutil.disk_usage(directory)
    return f"{usage.free / 2**20:.1f} MiB of {usage.total / 2**20:.0f} MiB are free in {directory}"
