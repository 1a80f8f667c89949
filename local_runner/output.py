"""Standard output that does not end a run when the disk under it is full."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any, TextIO

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _DroppingFile(io.FileIO):
    """A file that drops data for which the disk has no room."""

    def write(self, data: Any) -> int:
        """Write ``data``, or drop it on a full disk; return the number of bytes as if they were written."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return memoryview(data).nbytes


def standard_output() -> TextIO:
    """Return this process's standard output, with data dropped while the disk is full."""
    file = _DroppingFile(sys.stdout.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding=sys.stdout.encoding, errors=sys.stdout.errors)
