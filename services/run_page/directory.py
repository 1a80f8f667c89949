"""A run directory as the run page reads it: settings, outcome, metrics by column, first and last rewards, samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.core.errors import ConfigurationError
from services.core.files import read_object
from services.run_page.records import MAX_CHARACTERS, Position, SampleIndex, cut, parse, read_lines

RECORDS_A_REPLY = 1000
METRIC_DIGITS = 6
MARKS = ("nodes.json", "runner.lock", "metrics.jsonl", "components")
"""A directory with any of these is a run's. config.json is not among them, because models have one, too."""
AVERAGED_STEPS = 3
"""Most steps at the start and at the end over which rewards are averaged."""
FORK = "fork.json"
"""The file of a run directory with the run that it was forked from."""
FIRST_FAILURE = "first_failure.txt"
"""The file of a run directory with the first failure of the user's own code: its reason, the error and its place."""


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


@dataclass(frozen=True)
class RunOverview:
    """A run with the records of all components and the outcome.

    ``written`` is the time of the last line of metrics.jsonl, in seconds since 1970; None before the first. ``damaged``
    says which files could not be read, and why; ``first_failure`` is the content of FIRST_FAILURE. ``fork`` is that of
    FORK: the parent's name, the step and the changed settings; empty for a run that is no fork.
    """

    name: str
    path: str
    written: float | None
    components: dict[str, dict[str, Any]]
    summary: dict[str, Any]
    damaged: list[str]
    first_failure: str
    fork: dict[str, Any]


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

    def overview(self) -> RunOverview:
        """Return the run's settings, outcome and last write; a damaged file counts as empty and is named."""
        damaged: list[str] = []

        def read(name: str) -> dict[str, Any]:
            try:
                return read_object(self.path / name)
            except (ValueError, OSError) as error:
                damaged.append(f"{name} cannot be read: {str(error).removeprefix(f'{self.path / name} ')}")
                return {}

        components = read("config.json").get("components")
        if not isinstance(components, dict):
            components = {}
        return RunOverview(
            name=self.name,
            path=str(self.path),
            written=self._written(),
            components={name: record for name, record in components.items() if isinstance(record, dict)},
            summary=read("summary.json"),
            damaged=damaged,
            first_failure=first_failure(self.path),
            fork=read(FORK),
        )

    def _written(self) -> float | None:
        try:
            return (self.path / "metrics.jsonl").stat().st_mtime
        except OSError:
            return None

    def metrics(self, start: Position) -> Metrics:
        """Return the metrics of up to RECORDS_A_REPLY steps after ``start``."""
        read = read_lines(self.path / "metrics.jsonl", start, RECORDS_A_REPLY)
        records = [record for line in read.lines if (record := parse(line)) is not None]
        names = dict.fromkeys(name for record in records for name in record)
        for no_column in ("reward_counts", "failures"):
            names.pop(no_column, None)
        return Metrics(
            file=read.end.file,
            offset=read.end.offset,
            more=read.more,
            restarted=read.restarted,
            unreadable=len(read.lines) - len(records),
            columns={name: [_number(record.get(name)) for record in records] for name in names},
            reward_counts=[_counts(record.get("reward_counts")) for record in records],
        )


def find_runs(paths: list[Path]) -> list[RunDirectory]:
    """Return the runs at ``paths``, each a run directory or a directory of run directories, with distinct names.

    Raises:
        ConfigurationError: a path is neither.
    """
    run_dirs: list[Path] = []
    for path in paths:
        if is_run(path):
            run_dirs.append(path)
            continue
        within = sorted(child for child in path.iterdir() if is_run(child)) if path.is_dir() else []
        if not within:
            raise ConfigurationError(
                f"{path} is not a run directory: it has none of {', '.join(MARKS)}, nor has a directory in it. "
                "Give one such as runs/grpo-1, or the directory of all runs."
            )
        run_dirs += within
    unique = list(dict.fromkeys(path.resolve() for path in run_dirs))
    return [RunDirectory(_shortest_name(path, unique), path) for path in unique]


def _shortest_name(path: Path, among: list[Path]) -> str:
    """Return the run's id, with as many of its parent directories as distinguish it from runs of the same id."""
    others = [other for other in among if other != path]
    lengths = range(1, len(path.parts) + 1)
    parts = next(path.parts[-n:] for n in lengths if all(path.parts[-n:] != other.parts[-n:] for other in others))
    return str(Path(*parts))


def is_run(path: Path) -> bool:
    """Return whether ``path`` is a run's directory, also of a run that failed before its first step."""
    return path.is_dir() and any((path / mark).exists() for mark in MARKS)


def first_failure(run_dir: Path, since: float = 0.0) -> str:
    """Return the run's first failure of the user's own code; empty without one since that time."""
    path = run_dir / FIRST_FAILURE
    try:
        if path.stat().st_mtime < since:
            return ""
        with path.open(errors="replace") as file:
            return str(cut(file.read(MAX_CHARACTERS + 1))).strip()
    except OSError:
        return ""


def _number(value: Any) -> float | None:
    """Return a metric with METRIC_DIGITS digits, which keeps replies small; None if it is not a finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    # Times and byte counts are whole or need all their digits.
    if isinstance(value, int) or value.is_integer() or abs(value) >= 1e6:
        return value
    return float(f"{value:.{METRIC_DIGITS}g}")


def _counts(value: Any) -> list[tuple[float, int]] | None:
    """Return the number of completions by reward; None unless the value is a list of pairs of numbers."""
    if not isinstance(value, list):
        return None
    pairs: list[Any] = [v for v in value if isinstance(v, list) and len(v) == 2 and None not in map(_number, v)]
    return pairs


def of_sources(record: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Return what a record of metrics has of a column for each source, by the source's name."""
    start = f"{column}/"
    return {name.removeprefix(start): value for name, value in record.items() if name.startswith(start)}


def first_and_last(rewards: Sequence[float]) -> dict[str, float | int | None]:
    """Return the mean rewards of the first and of the last steps, and the number of steps that each averages.

    No step is in both means. A single step has a first mean only; without steps there is none.
    """
    steps = max(min(AVERAGED_STEPS, len(rewards) // 2), 1)
    return {
        "reward_first": statistics.fmean(rewards[:steps]) if rewards else None,
        "reward_last": statistics.fmean(rewards[-steps:]) if len(rewards) > 1 else None,
        "reward_steps": min(steps, len(rewards)),
    }
