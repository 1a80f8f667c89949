"""``grpo diagnose``: what is wrong with a run, with evidence; docs/guides/diagnosing.md explains the findings."""

from __future__ import annotations

import sys
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.text import Text

from local_runner.view import STYLES
from services.core.errors import ConfigurationError
from services.run_page.directory import find_run
from services.run_page.rules import NOTE, RULES

FOUND = 3
"""The exit code if something is found; notes do not count."""


def main(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Id or directory. Default: the newest run below runs/.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is wrong with a run, under way, ended or copied. Exit code 3: something is."""
    judged = find_run(run)
    found, steps = judged.findings(), len(judged.steps())
    if not steps:
        raise ConfigurationError(f"{judged.path} has no step yet; grpo status says what it waits for")
    if as_json:
        sys.stdout.buffer.write(orjson.dumps([vars(f) for f in found], option=orjson.OPT_INDENT_2) + b"\n")
    else:
        console = Console()
        for finding in found:
            console.print(Text(str(finding), STYLES.get(finding.severity, "")), soft_wrap=True)
        console.print(f"{len(found)} findings by {len(RULES)} rules in {steps} steps of {judged.name}", highlight=False)
    if any(finding.severity != NOTE for finding in found):
        raise typer.Exit(FOUND)
