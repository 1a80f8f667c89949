"""The memory of this node, and control over the freed memory that the C library (glibc) keeps."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

CGROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The limit of a container's memory, by version of the kernel's interface; SkyPilot's ``memory:`` sets it on a pod."""

KEPT_BLOCK_BYTES = 64 * 2**20
KEPT_BYTES = 2**31 - 1


def host_memory() -> int:
    """Return the bytes of memory of this machine or, where it is less, of this container."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for file in CGROUP_FILES if file.exists() and (text := file.read_text().strip()).isdecimal()]
    return min([machine, *limits])


def keep() -> None:
    """Make the C library (glibc) keep freed memory until ``release``, except blocks larger than KEPT_BLOCK_BYTES.

    Call this before starting threads: all threads then share one heap, while a running thread keeps its own.

    By default glibc returns large blocks at once, and the system clears each page of the next block, which took a
    quarter of the processor's time in training on a CPU. Larger blocks, such as an embedding, would leave large holes.
    """
    library = _c_library()
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def release() -> None:
    """Return free memory to the system, where the C library can (glibc).

    Tensors of very different sizes leave holes in the heap, which glibc never returns by itself: a gigabyte for a model
    of half a gigabyte. This takes milliseconds, so call it after a phase whose successor needs the memory.
    """
    library = _c_library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@cache
def _c_library() -> Any:
    """Return the C library with its functions as attributes; macOS and musl lack the functions used here."""
    return ctypes.CDLL(None)
