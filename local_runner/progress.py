"""The progress of a run, read from metrics.jsonl, to which the trainer appends one object a step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
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
    reward: float
    loss: float | None
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase; ``step`` is the whole step."""

    @classmethod
    def read(cls, line: bytes) -> Step | None:
        """Return the step of a line; None for another line, such as an evaluation's."""
        record: dict[str, Any] = json.loads(line)
        if "reward_mean" not in record:
            return None
        return cls(
            step=int(record["step"]),
            reward=record["reward_mean"],
            loss=record.get("loss"),
            seconds={
                name.removeprefix("seconds_"): float(value)
                for name, value in record.items()
                if name.startswith("seconds_") and value is not None
            },
        )


def new_steps(metrics: GrowingFile) -> list[Step]:
    """Return the steps appended to metrics.jsonl since the last call."""
    return [step for line in metrics.new_lines() if (step := Step.read(line)) is not None]
