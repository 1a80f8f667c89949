"""Show the state of a run: ``python -m scripts.status [RUN]``, by default of the newest run."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer
from rich.console import Console

from local_runner import status
from local_runner.directory import find_run
from services.core.errors import exit_code_of


def main(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Id or directory. Default: the newest run below runs/.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="JOBGROUP_TOKEN", show_envvar=True, help="Of a job group that has one.")
    ] = None,
) -> None:
    """Show the state of a run and of its components."""
    sys.exit(exit_code_of(lambda: asyncio.run(status.show(Console(), find_run(run), token))))


if __name__ == "__main__":
    typer.run(main)
