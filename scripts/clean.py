"""Lists runs with their sizes and removes them: ``python -m scripts.clean [RUN...] [--keep N] [--older-than 7d]``.

Without arguments it only lists. A run that is under way, or may be on another machine, is never removed.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from local_runner import directory
from local_runner.commands import module
from local_runner.directory import RUNS, Usage
from local_runner.view import duration, gigabytes
from services.core.errors import ConfigurationError, exit_code_of

AGE_UNITS = {"h": 3600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True)
class Listed:
    """A run, and why it is or may be under way; None when it is over."""

    path: Path
    usage: Usage
    under_way: str | None

    @property
    def state(self) -> str:
        """One word or a few."""
        state = directory.state_of(self.path, directory.read_nodes(self.path))
        return "may be under way" if self.under_way and state != "running" else state


def look_at(path: Path) -> Listed:
    """Measure a run."""
    usage = directory.usage(path)
    return Listed(path, usage, directory.under_way(path, usage.written))


def age(text: str) -> float:
    """Return ``12h``, ``7d`` or ``2w`` in seconds.

    Raises:
        ConfigurationError: it is none of these.
    """
    match = re.fullmatch(r"(\d+)([hdw])", text)
    if match is None:
        raise ConfigurationError(f"--older-than {text}: expected hours, days or weeks such as 12h, 7d or 2w")
    return int(match[1]) * AGE_UNITS[match[2]]


def select(runs: list[Path], keep: int | None, older_than: str | None) -> list[Listed]:
    """Return those of ``runs``, the newest first, that are neither among the newest ``keep`` nor younger."""
    candidates = [look_at(path) for path in runs[keep or 0 :]]
    limit = time.time() - age(older_than) if older_than else float("inf")
    return [run for run in candidates if run.usage.written < limit]


def remove(run: Listed) -> None:
    """Remove a run; its lock keeps runners out meanwhile.

    Raises:
        ConfigurationError: it is under way, or cannot be removed.
    """
    try:
        with directory.locked(run.path):
            shutil.rmtree(run.path)
    except BlockingIOError:
        raise ConfigurationError(f"{run.path} has just been started; it stays") from None
    except OSError as error:
        raise ConfigurationError(f"{run.path} cannot be removed: {error}") from error


def main(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs to remove, by id or directory.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=0, help="Remove all but so many of the newest runs.")] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove runs not written to for that long: 12h, 7d, 2w.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    below: Annotated[Path, typer.Option("--runs", metavar="DIR", help="The directory of runs.")] = RUNS,
) -> None:
    """Lists runs with their sizes, and removes those that it is told to."""

    def work() -> None:
        console = Console()
        if not runs and keep is None and older_than is None:
            show(console, [look_at(path) for path in directory.all_runs(below)], below)
            return
        chosen = _named(runs, below) if runs else select(directory.all_runs(below), keep, older_than)
        if runs and (keep is not None or older_than):
            raise ConfigurationError("give either runs or --keep and --older-than")
        _remove_all(console, chosen, named=bool(runs), asks=not yes and sys.stdin.isatty())

    sys.exit(exit_code_of(work))


def _named(names: list[str], below: Path) -> list[Listed]:
    paths = [directory.find_run(name, below) for name in names]
    return [look_at(path) for path in dict.fromkeys(paths)]


def _remove_all(console: Console, chosen: list[Listed], *, named: bool, asks: bool) -> None:
    busy = [run for run in chosen if run.under_way]
    for run in busy:
        stays = f"{run.path} is not removed: {run.under_way}"
        if named:
            raise ConfigurationError(stays)
        console.print(stays, style="yellow", soft_wrap=True, highlight=False)
    ended = [run for run in chosen if not run.under_way]
    if not ended:
        console.print("nothing to remove")
        return
    total = gigabytes(sum(run.usage.size for run in ended))
    if asks:
        _table(console, ended)
        if not typer.confirm(f"Remove {_count(ended)}, {total}, with models and checkpoints?"):
            return
    for run in ended:
        remove(run)
        console.print(f"removed {run.path}, {gigabytes(run.usage.size)}", soft_wrap=True, highlight=False)
    console.print(f"{total} freed")


def show(console: Console, runs: list[Listed], below: Path) -> None:
    """Print a table of the runs, what they take together, and how to remove some."""
    if not runs:
        console.print(f"there is no run below {below}/")
        return
    _table(console, runs)
    console.print(f"{_count(runs)}, {gigabytes(sum(run.usage.size for run in runs))}", highlight=False)
    command = " ".join([*module("scripts.clean"), *(["--runs", str(below)] if below != RUNS else [])])
    console.print(f"Remove some: {command} RUN..., or --keep 3, or --older-than 7d", highlight=False, soft_wrap=True)


def _table(console: Console, runs: list[Listed]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "size", "last written"):
        table.add_column(column, overflow="fold", justify="right" if column == "size" else "left")
    for run in runs:
        ago = f"{duration(max(time.time() - run.usage.written, 0))} ago"
        table.add_row(run.path.name, run.state, gigabytes(run.usage.size), ago)
    console.print(table)


def _count(runs: list[Listed]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


if __name__ == "__main__":
    typer.run(main)
