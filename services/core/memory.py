"""Memory that the C library keeps after it was freed."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

KEPT_BLOCK_BYTES = 64 * 2**20
KEPT_BYTES = 2**31 - 1


def keep() -> None:
    """Has the C library (glibc) keep what is freed until ``release``, but for blocks of more than KEPT_BLOCK_BYTES.

    All threads share it. To be called before there are other threads: those that have a heap of their own keep it.

    By default it gives large blocks back at once, and the system clears each page of the next one: in training on a CPU
    that took a quarter of the processor's time. Blocks of the size of an embedding would leave too large holes.
    """
    library = _c_library()
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def release() -> None:
    """Gives free memory back to the system, where the C library can (glibc).

    Tensors of very different sizes leave holes in the heap, which glibc keeps for ever: a gigabyte for a model of half
    a gigabyte. Worth the milliseconds after a phase that others, who have the machine next, follow.
    """
    library = _c_library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@cache
def _c_library() -> Any:
    """The C library, whose functions are attributes where it has them: macOS and musl have none of these."""
    return ctypes.CDLL(None)
