"""``grpo clean``: a table of runs with their sizes, and the removal of some.

A run that is under way, or may be on another machine, is never removed.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from local_runner.launch import grpo_command
from local_runner.spec import seconds
from local_runner.view import duration
from services.core.errors import ConfigurationError
from services.run_page.directory import RUNS, Run, all_runs, find_run

PARTS = ("checkpoints", "policy")
"""The directories of a run that only its continuation needs."""
GROUPS = "groups"
"""The directory with the recorded groups of a run, from which others can be trained: --keep-model leaves it."""


def main(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs to remove, by id or directory.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=0, help="Keep this many of the newest runs, and remove the others.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove runs not written to for this long: 12h, 7d, 2w.")
    ] = None,
    keep_model: Annotated[
        bool,
        typer.Option(
            "--keep-model",
            help="Remove only checkpoints and policy versions, so that the run cannot resume; recorded groups stay.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    below: Annotated[Path, typer.Option("--runs", metavar="DIR", help="The directory of runs.")] = RUNS,
) -> None:
    """List runs with their sizes, and remove some."""

    console = Console()
    has_rule = keep is not None or bool(older_than)
    if runs and has_rule:
        raise ConfigurationError("give either runs or --keep and --older-than")
    if not runs and not has_rule:
        if keep_model:
            raise ConfigurationError("--keep-model needs runs to clean: name them, or give --keep 0 for all")
        _list_runs(console, below)
        return
    if runs:
        chosen = [Listed(run) for run in {run.path: run for run in (find_run(name, below) for name in runs)}.values()]
    else:
        chosen = select(all_runs(below), keep, older_than)
    confirm = typer.confirm if not yes and sys.stdin.isatty() else None
    remove(console, chosen, named=bool(runs), keep_model=keep_model, confirm=confirm)


class Listed:
    """A run with its size in bytes, and the time of its newest file."""

    def __init__(self, run: Run) -> None:
        """Measure the run, and find the reason why it is or may be under way; None when it is over."""
        self.run, self.path = run, run.path
        self.size, self.written = run.usage()
        self.under_way = run.under_way(self.written)


def select(runs: list[Run], keep: int | None, older_than: str | None) -> list[Listed]:
    """Return the ``runs``, the newest first, that are not among the newest ``keep`` and are older than the given age.

    Raises:
        ConfigurationError: ``older_than`` is not an age.
    """
    try:
        limit = time.time() - seconds(older_than) if older_than else float("inf")
    except ValueError as error:
        raise ConfigurationError(f"--older-than {older_than}: {error}") from error
    return [run for run in map(Listed, runs[keep or 0 :]) if run.written < limit]


def _list_runs(console: Console, below: Path) -> None:
    """Print a table of the runs in ``below``, their total size, and the command that removes some."""
    runs = [*map(Listed, all_runs(below))]
    if not runs:
        console.print(f"there is no run below {below}/")
        return
    _table(console, runs)
    command = " ".join([grpo_command(), "clean", *(["--runs", str(below)] if below != RUNS else [])])
    hint = f"Remove some: {command} RUN..., or --keep 3, or --older-than 7d; --keep-model leaves model and records"
    console.print(hint, highlight=False, soft_wrap=True)


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
    for one in chosen:
        reason = one.under_way
        if keep_model and not (one.path / "model").exists():
            reason = reason or "it has no model/, and could only be resumed"
        if reason is None:
            ended.append(one)
        elif named:
            raise ConfigurationError(f"{one.path} is not removed: {reason}")
        else:
            console.print(f"{one.path} is not removed: {reason}", style="yellow", soft_wrap=True, highlight=False)
    if not ended:
        console.print("nothing to remove")
        return
    if confirm is not None:
        _table(console, ended)
        parts = "the checkpoints and policy versions of these runs, which then cannot be resumed"
        if not confirm(f"Remove {parts if keep_model else 'these runs, with models and checkpoints'}?"):
            return
    for one in ended:
        _remove(console, one, keep_model=keep_model)


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
    if (groups := one.path / GROUPS).exists():
        kept = f"kept {groups}, {decimal(one.run.usage(GROUPS)[0])}, for `grpo groups`; remove it by hand"
        console.print(kept, soft_wrap=True, highlight=False)


def _table(console: Console, runs: list[Listed]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "size", "last written"):
        table.add_column(column, overflow="fold", justify="right" if column == "size" else "left")
    for one in runs:
        ago = f"{duration(max(time.time() - one.written, 0))} ago"
        table.add_row(one.run.name, one.run.state, decimal(one.size), ago)
    console.print(table)
    console.print(f"number of runs: {len(runs)}, size: {decimal(sum(one.size for one in runs))}", highlight=False)
