"""What the head shows: rates, latencies and batch sizes over a sliding window, and their history by the second."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

WINDOW_SECONDS = 10.0
HISTORY_SECONDS = 600


@dataclass
class _Second:
    """What happened in one second."""

    at: int
    requests: int = 0
    states: int = 0
    milliseconds: list[float] = field(default_factory=list)


KEPT_LATENCIES = 200
"""A second: enough for percentiles of the window."""


class Meter:
    """Counts requests as they are answered."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()
        self.requests = 0
        self.overloaded = 0
        self.refused = 0

    def answered(self, states: int, seconds: float) -> None:
        """A request with so many states was answered after so long."""
        now = self._now()
        self.requests += 1
        now.requests += 1
        now.states += states
        if len(now.milliseconds) < KEPT_LATENCIES:
            now.milliseconds.append(1000 * seconds)

    def played(self, states: int) -> None:
        """The head itself asked for actions for so many states."""
        self._now().states += states

    def window(self) -> dict[str, Any]:
        """Rates a second and latencies of the newest WINDOW_SECONDS."""
        self._drop()
        now = time.monotonic()
        span = min(WINDOW_SECONDS, max(1.0, now - self._seconds[0].at)) if self._seconds else WINDOW_SECONDS
        latencies = sorted(ms for second in self._seconds for ms in second.milliseconds)
        return {
            "requests_per_second": round(sum(s.requests for s in self._seconds) / span, 2),
            "states_per_second": round(sum(s.states for s in self._seconds) / span, 2),
            "latency_ms": {f"p{p}": _percentile(latencies, p) for p in (50, 95, 99)},
        }

    def _now(self) -> _Second:
        at = int(time.monotonic())
        if not self._seconds or self._seconds[-1].at != at:
            self._drop()
            self._seconds.append(_Second(at))
        return self._seconds[-1]

    def _drop(self) -> None:
        oldest = time.monotonic() - WINDOW_SECONDS
        while self._seconds and self._seconds[0].at < oldest:
            self._seconds.popleft()


class History:
    """Points of the page's plots, one a second for ten minutes; a page that opens late sees what was before it."""

    def __init__(self) -> None:
        self.points: deque[dict[str, Any]] = deque(maxlen=HISTORY_SECONDS)
        self.added = asyncio.Event()

    def add(self, point: dict[str, Any]) -> None:
        """Adds a point and wakes those who wait for one."""
        self.points.append(point)
        self.added.set()
        self.added = asyncio.Event()

    def since(self, moment: float) -> list[dict[str, Any]]:
        """The points after a moment."""
        return [point for point in self.points if point["time"] > moment]


def _percentile(ordered: list[float], percent: int) -> float | None:
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))], 3)
