"""A stopwatch for time that several waits share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """A stopwatch that runs while at least one of its ``running`` contexts is open."""

    def __init__(self) -> None:
        self._open = 0
        self._started = 0.0
        self._before = 0.0

    @property
    def seconds(self) -> float:
        """The seconds that it has run."""
        return self._before + (time.monotonic() - self._started if self._open else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the stopwatch run within the context; contexts that overlap count once."""
        if not self._open:
            self._started = time.monotonic()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._before += time.monotonic() - self._started
