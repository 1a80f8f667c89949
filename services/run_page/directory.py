"""A run directory as the page reads it: settings, outcome, metrics by column, samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.run_page.lines import Position, parse, read_lines
from services.run_page.samples import SampleIndex

RECORDS_A_REPLY = 1000
SIGNIFICANT_DIGITS = 6
SUMMARY_DIGITS = 4

RewardCounts = list[tuple[float, int]]
"""The number of a step's completions by reward."""
RENAMED = {"seconds_reward": "seconds_score"}
"""Columns of version 0.1, by the names that they have now."""


@dataclass(frozen=True)
class Columns:
    """Metrics of some steps, by name; None where a step lacks one.

    ``unreadable`` counts the lines that are not JSON.
    """

    columns: dict[str, list[float | None]]
    reward_counts: list[RewardCounts | None]
    end: Position
    restarted: bool
    more: bool
    unreadable: int


@dataclass
class RunDirectory:
    """One run. ``name`` tells it from the others on the page."""

    name: str
    path: Path
    samples: SampleIndex = field(init=False)
    """Groups that were trained on."""
    evaluations: SampleIndex = field(init=False)
    """Greedy completions of held-out prompts, a group each."""

    def __post_init__(self) -> None:
        self.samples = SampleIndex(self.path / "samples.jsonl")
        self.evaluations = SampleIndex(self.path / "evaluations.jsonl")

    def settings(self) -> dict[str, Any]:
        """Return the trainer's settings, from config.json; empty as long as there is none."""
        settings: dict[str, Any] = self.components().get(Task.TRAINER.value, {}).get("settings", {})
        return settings

    def components(self) -> dict[str, dict[str, Any]]:
        """Return what each component ran with, by name, from config.json; empty as long as there is none."""
        content = _read_object(self.path / "config.json")
        # Version 0.1 wrote the trainer's settings alone.
        if content and "components" not in content:
            return {Task.TRAINER.value: {"settings": content}}
        components: dict[str, dict[str, Any]] = content.get("components", {})
        return components

    def summary(self) -> dict[str, Any]:
        """The outcome, from summary.json, rounded for people; empty as long as there is none."""
        return {name: _rounded(value) for name, value in _read_object(self.path / "summary.json").items()}

    def metrics(self, start: Position) -> Columns:
        """The metrics of up to RECORDS_A_REPLY steps after ``start``."""
        read = read_lines(self.path / "metrics.jsonl", start, RECORDS_A_REPLY)
        parsed = [parse(line) for line in read.lines]
        records = [record for record in parsed if record is not None]
        for record in records:
            for old, name in RENAMED.items():
                if old in record:
                    record.setdefault(name, record.pop(old))
        names = dict.fromkeys(name for record in records for name in record)
        names.pop("reward_counts", None)
        columns = {name: [_number(record.get(name)) for record in records] for name in names}
        counts = [record.get("reward_counts") for record in records]
        return Columns(columns, counts, read.end, read.restarted, read.more, len(parsed) - len(records))


def find_runs(paths: list[Path]) -> list[RunDirectory]:
    """The runs of ``paths``, each a run directory or a directory of such; names are made different where they agree.

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
    return [RunDirectory(name, path) for name, path in zip(_names(unique), unique, strict=True)]


def _names(paths: list[Path]) -> list[str]:
    names: list[str] = []
    for path in paths:
        is_alone = sum(other.name == path.name for other in paths) == 1
        # Runs of the same name lie in different volumes, whose paths tell them apart.
        names.append(path.name if is_alone else str(path))
    return names


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.json", "metrics.jsonl"))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return content


def _number(value: Any) -> float | None:
    """A metric as it is shown, which keeps replies small; None for what is not a finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    # Times and byte counts are whole or need their digits.
    return value if isinstance(value, int) or abs(value) >= 1e6 else float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _rounded(value: Any) -> Any:
    """Return ``value`` to SUMMARY_DIGITS digits, but to no fewer than its whole ones, if it is a fraction."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return round(value) if abs(value) >= 10**SUMMARY_DIGITS else float(f"{value:.{SUMMARY_DIGITS}g}")
