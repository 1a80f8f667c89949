"""Show the logs of a run's nodes: ``python -m scripts.logs [-f] [RUN] [TASK...]``, by default of the newest run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from local_runner import logs
from services.core.errors import exit_code_of

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN] [TASK]...",
        help="A run's id or directory, by default the newest run below runs/; then tasks such as ppo-trainer, or "
        "nodes such as ppo-trainer-1.",
    ),
]


def main(
    names: Names = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
    lines: Annotated[int | None, typer.Option("-n", "--lines", min=0, help="Only so many of the last lines.")] = None,
) -> None:
    """Show the logs of a run's components, in the order of time."""

    def work() -> None:
        run_dir, tasks = logs.choose_run(names or [])
        logs.show(Console(), run_dir, tasks, last=lines, follow=follow)

    try:
        sys.exit(exit_code_of(work))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    typer.run(main)
