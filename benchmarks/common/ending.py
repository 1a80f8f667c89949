"""Ends a benchmark in order when it is told to, so that what it started ends with it."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def end_in_order() -> None:
    """Has SIGTERM raise SystemExit, as Ctrl-C raises KeyboardInterrupt."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
