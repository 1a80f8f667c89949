"""``grpo verify``: all steps of a run that led to its checkpoints, computed again and compared to the bit.

docs/guides/explaining.md has examples.
"""

from __future__ import annotations

import orjson
import typer
from rich.console import Console
from rich.text import Text

from scripts.explain import AsJson, Below, Run, in_ranks, verdict
from services.core.errors import ConfigurationError
from services.run_page.directory import RUNS, find_run
from trainer.reporting.explanations import Compared
from trainer.reporting.group_records import GroupRecords


def main(run: Run, as_json: AsJson = False, below: Below = RUNS) -> None:
    """Compute all recorded steps of a run again, and compare with its checkpoints to the bit. Exit code 1: they differ.

    It answers whether another torch, transformers or machine trains the same.
    """
    run_dir = find_run(run, below).path
    steps = GroupRecords(run_dir).steps
    if not steps:
        raise ConfigurationError(
            f"{run_dir} has no recorded groups; RECORD_GROUPS says of which steps a run keeps them"
        )
    found = in_ranks("verify", run_dir, steps[-1])
    compared = [Compared.model_validate(one) for one in found]
    if as_json:
        print(orjson.dumps(found).decode())
    else:
        for one in compared:
            Console().print(Text(verdict(one)), soft_wrap=True)
    if any(one.step is not None for one in compared):
        raise typer.Exit(1)
