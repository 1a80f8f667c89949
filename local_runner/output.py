"""Standard output that does not end a run when the disk under it is full or its reader is gone."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any, TextIO

_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


class _DroppingFile(io.FileIO):
    """A file that drops data for which the disk has no room, or which nobody reads."""

    def write(self, data: Any) -> int:
        """Write ``data``, or drop it; return the number of bytes as if they were written."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            return memoryview(data).nbytes


def standard_output() -> TextIO:
    """Return this process's standard output, with data dropped while the disk is full or once its reader is gone."""
    file = _DroppingFile(sys.stdout.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding=sys.stdout.encoding, errors=sys.stdout.errors)
