"""Files: atomic replacement, and full disks."""

from __future__ import annotations

import shutil
from pathlib import Path

FULL_BELOW_BYTES = 64 * 2**20
"""A disk counts as full below this: a failed write may leave some space, and others may have freed some since."""


def atomic_write(path: Path, content: bytes | str) -> None:
    """Write a file that readers see whole: the old content or the new, never a part.

    The content goes to ``.{name}.partial`` in the same directory, which must exist, and is renamed into place. A failed
    write leaves the old file and no partial one. Nothing is synced to the disk.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def is_full(directory: Path) -> bool:
    """Return whether a write to the disk of ``directory`` may have failed for lack of space."""
    return shutil.disk_usage(directory).free < FULL_BELOW_BYTES


def free_space(directory: Path) -> str:
    """Return a phrase that says how much of the disk of ``directory`` is free."""
    usage = shutil.disk_usage(directory)
    return f"{usage.free / 2**20:.1f} MiB of {usage.total / 2**20:.0f} MiB are free in {directory}"
