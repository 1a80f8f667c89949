"""A run directory as the run page reads it: settings, outcome, metrics by column, samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from services.core.errors import ConfigurationError
from services.run_page.lines import Position, parse, read_lines
from services.run_page.samples import SampleIndex

RECORDS_A_REPLY = 1000
METRIC_DIGITS = 6


@dataclass(frozen=True)
class Metrics:
    """Metrics of some steps by column, with None where a step lacks one; also the reply of GET /api/metrics.

    ``file`` and ``offset`` are the position to continue from. ``restarted`` says that the file was replaced, so that
    earlier replies are obsolete; ``unreadable`` counts the lines that are not JSON.
    """

    file: str
    offset: int
    more: bool
    restarted: bool
    unreadable: int
    columns: dict[str, list[float | None]]
    reward_counts: list[list[tuple[float, int]] | None]
    """For each step, the number of completions by reward."""


@dataclass
class RunDirectory:
    """A run; ``name`` distinguishes it from the page's other runs."""

    name: str
    path: Path
    samples: SampleIndex = field(init=False)
    """The groups that were trained on."""
    evaluations: SampleIndex = field(init=False)
    """The greedy completions of held-out prompts, each a group of its own."""

    def __post_init__(self) -> None:
        self.samples = SampleIndex(self.path / "samples.jsonl")
        self.evaluations = SampleIndex(self.path / "evaluations.jsonl")

    def components(self) -> dict[str, dict[str, Any]]:
        """Return each component's record from config.json, by name; empty while the file does not exist."""
        components: dict[str, dict[str, Any]] = read_object(self.path / "config.json").get("components", {})
        return components

    def summary(self) -> dict[str, Any]:
        """Return the outcome from summary.json; empty while the file does not exist."""
        return read_object(self.path / "summary.json")

    def metrics(self, start: Position) -> Metrics:
        """Return the metrics of up to RECORDS_A_REPLY steps after ``start``."""
        read = read_lines(self.path / "metrics.jsonl", start, RECORDS_A_REPLY)
        records = [record for line in read.lines if (record := parse(line)) is not None]
        names = dict.fromkeys(name for record in records for name in record)
        names.pop("reward_counts", None)
        return Metrics(
            file=read.end.file,
            offset=read.end.offset,
            more=read.more,
            restarted=read.restarted,
            unreadable=len(read.lines) - len(records),
            columns={name: [_number(record.get(name)) for record in records] for name in names},
            reward_counts=[record.get("reward_counts") for record in records],
        )


def find_runs(paths: list[Path]) -> list[RunDirectory]:
    """Return the runs at ``paths``, each a run directory or a directory of run directories, with distinct names.

    Raises:
        ConfigurationError: a path is neither.
    """
    found: list[Path] = []
    for path in paths:
        if _is_run(path):
            found.append(path)
            continue
        within = sorted(child for child in path.iterdir() if _is_run(child)) if path.is_dir() else []
        if not within:
            raise ConfigurationError(
                f"{path} is no run directory: it has no config.json or metrics.jsonl, nor has a directory in it. "
                "Give one such as runs/grpo-1, or the directory of all runs."
            )
        found += within
    unique = list(dict.fromkeys(path.resolve() for path in found))
    names = [path.name for path in unique]
    # Runs of the same name are on different volumes, so that their paths distinguish them.
    return [RunDirectory(path.name if names.count(path.name) == 1 else str(path), path) for path in unique]


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.json", "metrics.jsonl"))


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no such file."""
    try:
        content: dict[str, Any] = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return content


def _number(value: Any) -> float | None:
    """Return a metric with METRIC_DIGITS digits, which keeps replies small; None if it is not a finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    # Times and byte counts are whole or need all their digits.
    return value if isinstance(value, int) or abs(value) >= 1e6 else float(f"{value:.{METRIC_DIGITS}g}")
