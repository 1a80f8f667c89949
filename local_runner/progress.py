"""The progress of a run, read from metrics.jsonl, to which the trainer appends one object a step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class GrowingFile:
    """A text file that another process appends to, and may not have created yet."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """Read from the beginning, or only lines that are appended from now on."""
        self.path = path
        self._position = path.stat().st_size if from_end and path.exists() else 0

    def new_lines(self) -> Iterator[bytes]:
        """Yield each complete line since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            # A restarted trainer may have cut the file back to its checkpoint.
            self._position = min(self._position, file.seek(0, os.SEEK_END))
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._position += len(line)
                yield line


@dataclass(frozen=True)
class Step:
    """The record of one step in metrics.jsonl."""

    step: int
    reward: float | None
    """The mean over completions; None if none could be scored."""
    loss: float | None
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase; ``step`` is the whole step."""
    trained_tokens: float | None = None
    """0 for a step whose rewards gave nothing to learn from."""
    reward_counts: Sequence[tuple[float, int]] = ()
    """The number of completions by reward."""
    failures: Sequence[tuple[str, int, str]] = ()
    """Completions without a reward or over a limit: reason, count, and what one of them says."""

    @classmethod
    def read(cls, line: bytes) -> Step:
        """Return the step of a line of metrics.jsonl."""
        record: dict[str, Any] = json.loads(line)
        return cls(
            step=int(record["step"]),
            reward=record.get("reward_mean"),
            loss=record.get("loss"),
            trained_tokens=record.get("trained_tokens"),
            reward_counts=[(reward, count) for reward, count in record.get("reward_counts", ())],
            failures=[(reason, count, said) for reason, count, said in record.get("failures", ())],
            seconds={
                name.removeprefix("seconds_"): float(value)
                for name, value in record.items()
                if name.startswith("seconds_") and value is not None
            },
        )


def new_steps(metrics: GrowingFile) -> list[Step]:
    """Return the steps appended to metrics.jsonl since the last call."""
    return [Step.read(line) for line in metrics.new_lines()]


def mean_rewards(steps: Sequence[Step]) -> list[float]:
    """Return the mean reward of each step that has one."""
    return [step.reward for step in steps if step.reward is not None]
