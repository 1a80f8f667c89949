"""Standard output for a run that goes on although the disk under it is full."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any, TextIO

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _DroppingFile(io.FileIO):
    """A file that drops what a full disk does not take."""

    def write(self, data: Any) -> int:
        """Write what the disk takes; all of it is said to be written where it takes nothing."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return memoryview(data).nbytes


def standard_output() -> TextIO:
    """Return this process's standard output, which drops what cannot be written since a disk is full."""
    file = _DroppingFile(sys.stdout.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding=sys.stdout.encoding, errors=sys.stdout.errors)
