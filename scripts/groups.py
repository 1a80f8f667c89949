"""``grpo groups``: answers that a run was trained on, selected from its record for another training.

The record is what RECORD_GROUPS keeps of a run, token for token. docs/guides/operating.md has examples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table

from local_runner import directory
from services.core.errors import ConfigurationError
from services.core.files import atomic_write
from services.protocol import group_file
from trainer.reporting.group_records import GroupRecords
from trainer.reporting.group_selection import FIELDS, Account, Expression, choose, groups_of, pairs_of, select


def main(
    run: Annotated[str, typer.Argument(help="Id or directory of the run.")],
    where: Annotated[
        str,
        typer.Argument(
            metavar="[EXPRESSION]",
            help=f"A condition on answers, as 'reward >= 1 and source == \"countdown\"', of {', '.join(FIELDS)}.",
        ),
    ] = "True",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the answers. Default: only count.")] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Write the best and the worst answer of each group as JSON Lines for DPO.")
    ] = False,
    per_prompt: Annotated[int, typer.Option(min=1, metavar="K", help="Most answers, or pairs, of a prompt.")] = 4,
    held_out: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="JSON Lines; prompts equal to the `prompt` of a line are left out."),
    ] = None,
    below: Annotated[Path, typer.Option("--runs", metavar="DIR", help="The directory of runs.")] = directory.RUNS,
) -> None:
    """Select answers that a run was trained on, token for token."""
    run_dir = directory.find_run(run, below)
    records, expression, account = GroupRecords(run_dir), Expression(where), Account()
    if not records.steps:
        raise ConfigurationError(
            f"{run_dir} has no recorded groups; RECORD_GROUPS says of which steps a run keeps them"
        )
    own = run_dir / "evaluations.jsonl"
    texts = frozenset(text for file in ([own] * own.exists() + (held_out or [])) for text in _prompts(file))
    selected = [*select(records, expression, texts, account)]
    if missing := expression.unknown_keys:
        raise ConfigurationError(f"{where!r}: no answer has {', '.join(missing)}")
    content: Iterator[bytes]
    if pairs:
        content = (orjson.dumps(pair) + b"\n" for pair in pairs_of(records, selected, per_prompt, account))
    else:
        first = records.head(records.steps[0])
        head = group_file.GroupFileHead(
            run=run_dir.name, model=first.settings.get("model_name"), tokenizer=first.tokenizer, where=where
        )
        content = group_file.parts(head, groups_of(records, choose(selected, per_prompt, account)))
    if out is None:
        deque(content, maxlen=0)
    else:
        try:
            atomic_write(out, content)
        except OSError as error:
            raise ConfigurationError(f"--out {out} cannot be written: {error}") from error
    _print(account, "pairs" if pairs else "answers")
    if not account.kept.total():
        raise ConfigurationError(f"no {'pair' if pairs else 'answer'} is left of {run_dir}; the table says why")


def _prompts(file: Path) -> Iterator[str]:
    """Yield the prompts of a file's lines.

    Raises:
        ConfigurationError: the file cannot be read, or a line has no prompt.
    """
    number = 0
    try:
        for line in file.read_bytes().splitlines():
            number += 1
            yield str(orjson.loads(line)["prompt"])
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{file}, line {number}: needed is an object with a `prompt`") from error


def _print(account: Account, what: str) -> None:
    """Print what was kept of each source, and what was left out, by reason."""
    console = Console()
    table = Table(box=None, pad_edge=False)
    for column in ("source", "answers", "right", f"kept {what}"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for source, seen in sorted(account.seen.items()):
        right = f"{account.right[source] / seen:.1%}"
        table.add_row(source or "(all)", f"{seen:,}", right, f"{account.kept[source]:,}")
    console.print(table)
    for reason, count in sorted(account.left_out.items()):
        if count:
            console.print(f"left out: {count:,} {reason}", highlight=False)
