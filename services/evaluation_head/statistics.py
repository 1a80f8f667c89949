"""Statistics for the dashboard: moments of returns, rates and latencies over a window, and their history."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

WINDOW_SECONDS = 10.0
HISTORY_SECONDS = 600
KEPT_ANSWERS = 2000
"""Answers kept for rates and percentiles; with more of them in WINDOW_SECONDS the window is shorter."""


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of values."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Count a value (Welford 1962)."""
        self.count += 1
        change = value - self.mean
        self.mean += change / self.count
        self.squares += change * (value - self.mean)

    def as_dict(self) -> dict[str, float | int | None]:
        """Return count, mean and standard deviation for /stats; None where there are too few values."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else None
        return {"count": self.count, "mean": self.mean if self.count else None, "deviation": deviation}


class _Answer(NamedTuple):
    at: float
    states: int
    seconds: float | None


class Meter:
    """Counts requests and states as they are answered."""

    def __init__(self) -> None:
        self._answers: deque[_Answer] = deque(maxlen=KEPT_ANSWERS)
        self.requests = 0
        self.states = 0
        self.overloaded = 0

    def count(self, states: int, seconds: float | None) -> None:
        """Count states that got actions; ``seconds`` is the latency of their request to /evaluate, if there was one."""
        self._answers.append(_Answer(time.monotonic(), states, seconds))
        self.states += states
        self.requests += seconds is not None

    def window(self) -> dict[str, Any]:
        """Return rates a second and latencies of the newest WINDOW_SECONDS."""
        now = time.monotonic()
        newest = [answer for answer in self._answers if answer.at >= now - WINDOW_SECONDS]
        span = max(1.0, now - newest[0].at) if newest else WINDOW_SECONDS
        latencies = [1000 * answer.seconds for answer in newest if answer.seconds is not None]
        return {
            "requests_per_second": round(len(latencies) / span, 2),
            "states_per_second": round(sum(answer.states for answer in newest) / span, 2),
            "latency_ms": {
                f"p{p}": round(float(np.percentile(latencies, p)), 3) if latencies else None for p in (50, 95, 99)
            },
        }


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
