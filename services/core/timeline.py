"""The timeline of a run: spans of phases and groups, as Chrome's trace format has them."""

from __future__ import annotations

import time
from typing import Any


class Timeline:
    """Spans of this process on named tracks; they are kept only between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, str, float, float]] | None = None
        self._began = 0.0

    def begin(self) -> None:
        """Begin to keep spans."""
        self._spans, self._began = [], time.perf_counter()

    def add(self, track: str, name: str, start: float, end: float) -> None:
        """Add a span from ``start`` to ``end`` (time.perf_counter); what lies before ``begin`` is cut off."""
        if self._spans is not None and end > self._began:
            self._spans.append((track, name, max(start, self._began), end))

    def end(self) -> list[dict[str, Any]]:
        """Return the spans as events of Chrome's trace format, in microseconds since ``begin``, and keep no more."""
        spans, self._spans = self._spans or [], None
        tracks = {track: number for number, track in enumerate(dict.fromkeys(track for track, *_ in spans))}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": track}}
            for track, number in tracks.items()
        ]
        return names + [
            {
                "ph": "X",
                "name": name,
                "pid": 0,
                "tid": tracks[track],
                "ts": (start - self._began) * 1e6,
                "dur": (end - start) * 1e6,
            }
            for track, name, start, end in spans
        ]


TIMELINE = Timeline()
"""The timeline of this process."""
