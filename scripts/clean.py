"""List runs with their sizes and remove them: ``python -m scripts.clean [RUN...] [--keep N] [--older-than 7d]``.

Without arguments it only lists. A run that is under way, or may be on another machine, is never removed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from local_runner import cleaning, directory
from local_runner.cleaning import Listed
from services.core.errors import ConfigurationError, exit_code_of


def main(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs to remove, by id or directory.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=0, help="Remove all but so many of the newest runs.")] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove runs not written to for that long: 12h, 7d, 2w.")
    ] = None,
    keep_model: Annotated[
        bool,
        typer.Option("--keep-model", help="Remove only checkpoints and policy versions; such a run cannot resume."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    below: Annotated[Path, typer.Option("--runs", metavar="DIR", help="The directory of runs.")] = directory.RUNS,
) -> None:
    """List runs with their sizes, and remove some."""

    def work() -> None:
        console = Console()
        has_rule = keep is not None or bool(older_than)
        if not runs and not has_rule:
            if keep_model:
                raise ConfigurationError("--keep-model needs runs to clean: name them, or give --keep 0 for all")
            cleaning.show(console, below)
            return
        if runs and has_rule:
            raise ConfigurationError("give either runs or --keep and --older-than")
        if runs:
            chosen = [Listed.of(path) for path in dict.fromkeys(directory.find_run(name, below) for name in runs)]
        else:
            chosen = cleaning.select(directory.all_runs(below), keep, older_than)
        asks = not yes and sys.stdin.isatty()
        confirm = typer.confirm if asks else None
        cleaning.remove(console, chosen, named=bool(runs), keep_model=keep_model, confirm=confirm)

    sys.exit(exit_code_of(work))


if __name__ == "__main__":
    typer.run(main)
