"""Memory that the C library keeps after it was freed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def release() -> None:
    """Gives free memory back to the system, where the C library can (glibc).

    Tensors of very different sizes leave holes in the heap, which glibc keeps for ever: a gigabyte for a model of half
    a gigabyte. Worth the milliseconds after a phase that others, who have the machine next, follow.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # macOS, musl, Windows
        return None
