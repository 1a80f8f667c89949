"""Writing to the volume of the run directory: a full disk becomes one error that says which path, and what to do."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from services.core.errors import DependencyLostError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""No room is left on the device, or in the user's quota."""

PROBE_BYTES = 1 << 20


class DiskFullError(DependencyLostError):
    """The volume of the run directory has no room for what must be written."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error that means that the disk of ``path`` is full into a DiskFullError."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        if isinstance(error, DiskFullError) or not _is_full(error, there):
            raise
        usage = shutil.disk_usage(there)
        raise DiskFullError(
            f"the disk is full: {path} cannot be written, {usage.free / 1e9:.3f} of {usage.total / 1e9:.3f} GB are "
            "free there. Make room on that volume, for example by removing old runs; started again, the run goes on "
            "from its newest checkpoint. CHECKPOINTS_KEPT and PUBLISHED_VERSIONS_KEPT say how much of itself it keeps."
        ) from error


def _is_full(error: BaseException, directory: Path) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    if isinstance(error, CheckpointException):
        # torch's file writer loses the system's error.
        return not _has_room(directory)
    return "No space left on device" in str(error)  # safetensors has the system's words in an error of its own


def _has_room(directory: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=directory if directory.is_dir() else directory.parent) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        return error.errno not in FULL
    return True
