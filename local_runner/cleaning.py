"""The removal of runs, with the table that lists them; a run that is or may be under way is never removed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from local_runner import directory, run_state
from local_runner.commands import module
from local_runner.directory import RUNS
from local_runner.spec import seconds
from local_runner.view import duration
from services.core.errors import ConfigurationError

PARTS = ("checkpoints", "policy")
"""The directories of a run that only its continuation needs."""


@dataclass(frozen=True)
class Listed:
    """A run with its size in bytes, and the time of its newest file."""

    path: Path
    size: int
    written: float
    under_way: str | None
    """The reason why the run is or may be under way; None when it is over."""

    @classmethod
    def of(cls, path: Path) -> Listed:
        """Measure the run at ``path``."""
        size, written = directory.usage(path)
        return cls(path, size, written, run_state.under_way(path, written))


def select(runs: list[Path], keep: int | None, older_than: str | None) -> list[Listed]:
    """Return the ``runs``, the newest first, that are not among the newest ``keep`` and are older than the given age.

    Raises:
        ConfigurationError: ``older_than`` is no age.
    """
    try:
        limit = time.time() - seconds(older_than) if older_than else float("inf")
    except ValueError as error:
        raise ConfigurationError(f"--older-than {older_than}: {error}") from error
    return [run for run in map(Listed.of, runs[keep or 0 :]) if run.written < limit]


def show(console: Console, below: Path) -> None:
    """Print a table of the runs in ``below``, their total size, and the command that removes some."""
    runs = [Listed.of(path) for path in directory.all_runs(below)]
    if not runs:
        console.print(f"there is no run below {below}/")
        return
    _table(console, runs)
    command = " ".join([*module("scripts.clean"), *(["--runs", str(below)] if below != RUNS else [])])
    told = f"Remove some: {command} RUN..., or --keep 3, or --older-than 7d; --keep-model leaves model and records"
    console.print(told, highlight=False, soft_wrap=True)


def remove(
    console: Console, chosen: list[Listed], *, named: bool, keep_model: bool, confirm: Callable[[str], bool] | None
) -> None:
    """Remove runs, except those that are or may be under way.

    Args:
        console: for the messages.
        chosen: the runs.
        named: whether each was named, so that a run under way is an error.
        keep_model: remove only the checkpoints and policy versions, and those only of runs that have a model.
        confirm: asks the question that it is given; None: remove without asking.

    Raises:
        ConfigurationError: a named run is under way, or a run cannot be removed.
    """
    ended = []
    for run in chosen:
        reason = run.under_way
        if keep_model and not (run.path / "model").exists():
            reason = reason or "it has no model/, and could only be resumed"
        if reason is None:
            ended.append(run)
        elif named:
            raise ConfigurationError(f"{run.path} is not removed: {reason}")
        else:
            console.print(f"{run.path} is not removed: {reason}", style="yellow", soft_wrap=True, highlight=False)
    if not ended:
        console.print("nothing to remove")
        return
    if confirm is not None:
        _table(console, ended)
        parts = "the checkpoints and policy versions of these runs, which then cannot be resumed"
        if not confirm(f"Remove {parts if keep_model else 'these runs, with models and checkpoints'}?"):
            return
    for run in ended:
        _remove(run, [run.path / name for name in PARTS] if keep_model else [run.path])
        left = directory.usage(run.path)[0] if keep_model else 0
        what = f"{' and '.join(PARTS)} of {run.path}" if keep_model else str(run.path)
        console.print(f"removed {what}, {decimal(run.size - left)}", soft_wrap=True, highlight=False)


def _remove(run: Listed, folders: list[Path]) -> None:
    """Remove directories of a run while its lock keeps runners out."""
    try:
        with directory.locked(run.path):
            for folder in filter(Path.exists, folders):
                shutil.rmtree(folder)
    except OSError as error:
        raise ConfigurationError(f"{run.path} cannot be removed: {error}") from error


def _table(console: Console, runs: list[Listed]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "size", "last written"):
        table.add_column(column, overflow="fold", justify="right" if column == "size" else "left")
    for run in runs:
        ago = f"{duration(max(time.time() - run.written, 0))} ago"
        table.add_row(run.path.name, run_state.state_of(run.path), decimal(run.size), ago)
    console.print(table)
    console.print(f"number of runs: {len(runs)}, size: {decimal(sum(run.size for run in runs))}", highlight=False)
