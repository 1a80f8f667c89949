"""Imports of many modules at the start of a process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collection() -> Iterator[None]:
    """Collect no garbage within the block, which imports, and keep its objects out of all later collections.

    The objects of an import stay, yet each collection during it would look at all of them again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
