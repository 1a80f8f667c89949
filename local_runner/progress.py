"""Follows a run's metrics: one object a step, as the trainer appends them to metrics.jsonl."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """What a line of metrics.jsonl says of a step."""

    step: int
    reward: float
    loss: float | None
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""

    @classmethod
    def read(cls, line: bytes) -> Step | None:
        """The step of a line; None for a line that is not about a step, such as an evaluation's."""
        record: dict[str, Any] = json.loads(line)
        if "reward_mean" not in record:
            return None
        return cls(
            step=int(record["step"]),
            reward=record["reward_mean"],
            loss=record.get("loss"),
            seconds={
                # Earlier runs call the phase that scores "reward".
                {"seconds_reward": "score"}.get(name, name.removeprefix("seconds_")): float(value)
                for name, value in record.items()
                if name.startswith("seconds_") and value is not None
            },
        )


class Pace:
    """Says from the steps seen so far how long the rest takes."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def seen(self, step: Step) -> None:
        """Takes note that ``step`` ended now."""
        self._seen = [*self._seen[-5:], (time.monotonic(), step.step)]

    def seconds_left(self, total_steps: int) -> float | None:
        """Return the seconds until the last of ``total_steps``, from the mean of the last few.

        None while the pace is unknown, and after the last step.
        """
        if not total_steps or len(self._seen) < 2:
            return None
        (first_time, first), (last_time, last) = self._seen[0], self._seen[-1]
        if last <= first or last >= total_steps:
            return None
        return (last_time - first_time) / (last - first) * (total_steps - last)


class MetricsFile:
    """A file of metrics that another process appends to, and may not have begun yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def new_steps(self) -> list[Step]:
        """The steps appended since the last call, or since this object was made."""
        if not self._path.exists():
            return []
        steps = []
        with self._path.open("rb") as file:
            # A restarted trainer may have cut the file back to its checkpoint.
            self._position = min(self._position, file.seek(0, os.SEEK_END))
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                self._position += len(line)
                if (step := Step.read(line)) is not None:
                    steps.append(step)
        return steps
