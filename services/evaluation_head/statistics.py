"""Statistics for the dashboard: moments of returns, rates and latencies over a window, and their history."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WINDOW_SECONDS = 10
HISTORY_SECONDS = 600
KEPT_LATENCIES = 200
"""Latencies kept of each second: enough for percentiles of the window."""


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of values."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, other: Moments) -> None:
        """Combine with the moments of other values (Chan, Golub and LeVeque 1983, eq. 2.1)."""
        if not other.count:
            return
        count, change = self.count + other.count, other.mean - self.mean
        self.squares += other.squares + change**2 * self.count * other.count / count
        self.mean += change * other.count / count
        self.count = count

    def as_dict(self) -> dict[str, float | int | None]:
        """Return count, mean and standard deviation for /stats; None where there are too few values."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else None
        return {"count": self.count, "mean": self.mean if self.count else None, "deviation": deviation}


@dataclass
class _Second:
    """Requests and states of one second, and latencies of some of the requests."""

    at: int
    requests: int = 0
    states: int = 0
    milliseconds: list[float] = field(default_factory=list)


class Meter:
    """Counts requests and states as they are answered."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_SECONDS + 1)
        self.requests = 0
        self.states = 0
        self.overloaded = 0
        self.refused = 0

    def count_request(self, seconds: float) -> None:
        """Count a request that was answered after ``seconds``."""
        now = self._now()
        self.requests += 1
        now.requests += 1
        if len(now.milliseconds) < KEPT_LATENCIES:
            now.milliseconds.append(1000 * seconds)

    def count_states(self, states: int) -> None:
        """Count states that got actions."""
        self.states += states
        self._now().states += states

    def window(self) -> dict[str, Any]:
        """Return rates a second and latencies of the newest WINDOW_SECONDS."""
        now = time.monotonic()
        newest = [second for second in self._seconds if second.at >= now - WINDOW_SECONDS]
        span = max(1.0, now - newest[0].at) if newest else WINDOW_SECONDS
        latencies = [ms for second in newest for ms in second.milliseconds]
        return {
            "requests_per_second": round(sum(second.requests for second in newest) / span, 2),
            "states_per_second": round(sum(second.states for second in newest) / span, 2),
            "latency_ms": {
                f"p{p}": round(float(np.percentile(latencies, p)), 3) if latencies else None for p in (50, 95, 99)
            },
        }

    def _now(self) -> _Second:
        at = int(time.monotonic())
        if not self._seconds or self._seconds[-1].at != at:
            self._seconds.append(_Second(at))
        return self._seconds[-1]


class History:
    """Points of the dashboard's plots, one a second for ten minutes, so that a page opened late shows them, too."""

    def __init__(self) -> None:
        self._points: deque[dict[str, Any]] = deque(maxlen=HISTORY_SECONDS)
        self.added = asyncio.Event()
        """Set when the next point is added, and then replaced by a new event."""

    def add(self, point: dict[str, Any]) -> None:
        """Add a point and wake the tasks that wait for one."""
        self._points.append(point)
        self.added.set()
        self.added = asyncio.Event()

    def since(self, moment: float) -> list[dict[str, Any]]:
        """Return the points after a moment."""
        return [point for point in self._points if point["time"] > moment]
