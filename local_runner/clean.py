"""``grpo clean``: a table of runs with their sizes, and the removal of some.

A run that is under way, or may be on another machine, is never removed.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from local_runner.launch import grpo_command
from local_runner.view import duration
from services.core.errors import ConfigurationError
from services.run_page.directory import RUNS, Run, all_runs, find_run

PARTS = ("checkpoints", "policy")
"""The directories of a run that only its continuation needs."""
KEEP_MODEL = "Remove only checkpoints and policy versions, so that the run cannot resume; recorded groups stay."


def main(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Ids or directories to remove.")] = None,
    keep: Annotated[int | None, typer.Option(min=0, help="Keep this many, the newest; remove the others.")] = None,
    keep_model: Annotated[bool, typer.Option("--keep-model", help=KEEP_MODEL)] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    below: Annotated[Path, typer.Option("--runs", metavar="DIR", help="The directory of runs.")] = RUNS,
) -> None:
    """List runs with their sizes, and remove some."""

    console = Console()
    if runs and keep is not None:
        raise ConfigurationError("give either runs or --keep")
    if not runs and keep is None:
        if keep_model:
            raise ConfigurationError("--keep-model needs runs to clean: name them, or give --keep 0 for all")
        _print_runs(console, [*map(Listed, all_runs(below))])
        place = [] if below == RUNS else ["--runs", str(below)]
        hint = " RUN..., or --keep 3; --keep-model leaves model and records"
        console.print(shlex.join([grpo_command(), "clean", *place]) + hint, highlight=False, soft_wrap=True)
        return
    chosen = [find_run(name, below) for name in runs or ()] or all_runs(below)[keep or 0 :]
    listed = [*map(Listed, {run.path: run for run in chosen}.values())]
    ended = [*_ended(console, listed, named=bool(runs), keep_model=keep_model)]
    if not ended:
        console.print("nothing to remove")
        return
    if not yes and sys.stdin.isatty():
        _print_runs(console, ended)
        parts = "the checkpoints and policy versions of these runs, which then cannot be resumed"
        if not typer.confirm(f"Remove {parts if keep_model else 'these runs, with models and checkpoints'}?"):
            return
    for one in ended:
        _remove(console, one, keep_model=keep_model)


class Listed:
    """A run with its size in bytes, and the time of its newest file."""

    def __init__(self, run: Run) -> None:
        """Measure the run."""
        self.run, self.path = run, run.path
        self.size, self.written = run.usage()


def _ended(console: Console, chosen: list[Listed], *, named: bool, keep_model: bool) -> Iterator[Listed]:
    """Yield the runs that may be removed, or with ``keep_model`` cleaned; print why others may not.

    Raises:
        ConfigurationError: a run that was named may not.
    """
    for one in chosen:
        reason = one.run.under_way(one.written)
        if keep_model and not (one.path / "model").exists():
            reason = reason or "it has no model/, and could only be resumed"
        if reason is None:
            yield one
        elif named:
            raise ConfigurationError(f"{one.path} is not removed: {reason}")
        else:
            console.print(f"{one.path} is not removed: {reason}", style="yellow", soft_wrap=True, highlight=False)


def _remove(console: Console, one: Listed, *, keep_model: bool) -> None:
    """Remove a run, or its PARTS, while its lock keeps runners out; print what was removed, and what is kept."""
    try:
        with one.run.locked():
            for folder in [one.path / name for name in PARTS] if keep_model else [one.path]:
                if folder.exists():
                    shutil.rmtree(folder)
    except OSError as error:
        raise ConfigurationError(f"{one.path} cannot be removed: {error}") from error
    left = one.run.usage()[0] if keep_model else 0
    what = f"{' and '.join(PARTS)} of {one.path}" if keep_model else str(one.path)
    console.print(f"removed {what}, {decimal(one.size - left)}", soft_wrap=True, highlight=False)


def _print_runs(console: Console, runs: list[Listed]) -> None:
    """Print a table of runs, and their total size."""
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "size", "last written"):
        table.add_column(column, overflow="fold", justify="right" if column == "size" else "left")
    for one in runs:
        ago = f"{duration(max(time.time() - one.written, 0))} ago"
        table.add_row(one.run.name, one.run.state, decimal(one.size), ago)
    console.print(table)
    console.print(f"number of runs: {len(runs)}, size: {decimal(sum(one.size for one in runs))}", highlight=False)
