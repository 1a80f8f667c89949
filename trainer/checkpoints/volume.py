"""Writes to the volume of the run directory: a full disk becomes one error with the path and the remedy."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from services.core.errors import DependencyLostError
from services.core.files import replace_directory

FULL = (errno.ENOSPC, errno.EDQUOT)
"""System errors of a full device and of a full quota."""

PROBE_BYTES = 1 << 20


class DiskFullError(DependencyLostError):
    """A full disk below the run directory."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise DiskFullError in place of an error within that means that the disk of ``path`` is full."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        if isinstance(error, DiskFullError) or not _is_full(error, there):
            raise
        usage = shutil.disk_usage(there)
        raise DiskFullError(
            f"the disk is full: {path} cannot be written, {usage.free / 1e9:.3f} of {usage.total / 1e9:.3f} GB are "
            "free there. Make room on that volume, for example by removing old runs (grpo clean), or keep fewer "
            "checkpoints (CHECKPOINTS_KEPT); started again, the run goes on from its newest checkpoint."
        ) from error


def write_whole(directory: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a hidden directory, which then takes the place of ``directory``, so that it is never partial.

    Raises:
        DiskFullError: the disk is full; nothing stays of the hidden directory.
    """
    hidden = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(hidden, ignore_errors=True)
    with writing(directory):
        try:
            hidden.mkdir(parents=True)
            write(hidden)
            replace_directory(hidden, directory)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def _is_full(error: BaseException, directory: Path) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    if isinstance(error, CheckpointException):
        # torch's file writer drops the system's error, so try to write.
        return not _has_room(directory)
    return "No space left on device" in str(error)  # safetensors quotes the system's message


def _has_room(directory: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=directory if directory.is_dir() else directory.parent) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        return error.errno not in FULL
    return True
