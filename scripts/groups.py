"""``grpo groups``: answers that a run was trained on, selected from its record for another training.

The record is what RECORD_GROUPS keeps of a run, token for token. docs/guides/operating.md has examples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.core.errors import ConfigurationError
from services.core.files import atomic_write
from services.core.settings import ModelSettings
from services.protocol import group_file
from services.protocol.groups import Group
from services.run_page.directory import RUNS, find_run
from trainer.reporting.group_records import GroupRecords, StepHead
from trainer.reporting.group_selection import FIELDS, Account, Expression, choose, groups_of, pairs_of, select

CONDITION = f"A condition on answers, as 'reward >= 1 and source == \"countdown\"'. Names: {', '.join(FIELDS)}."


def main(
    run: Annotated[str, typer.Argument(help="Id or directory of the run.")],
    where: Annotated[
        str,
        typer.Argument(metavar="[EXPRESSION]", help=CONDITION),
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
    below: Annotated[Path, typer.Option("--runs", metavar="DIR", help="The directory of runs.")] = RUNS,
) -> None:
    """Select answers that a run was trained on, token for token."""
    run_dir = find_run(run, below).path
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
    head = records.head(records.steps[0])
    content: Iterator[bytes]
    if pairs:
        text_of = _prompt_texts(run_dir, head)
        content = (orjson.dumps(pair) + b"\n" for pair in pairs_of(records, selected, per_prompt, account, text_of))
    else:
        model, tokenizer = head.settings.get("model_name"), head.tokenizer
        named = group_file.GroupFileHead(run=run_dir.name, model=model, tokenizer=tokenizer, where=where)
        content = group_file.parts(named, groups_of(records, choose(selected, per_prompt, account)))
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


def _prompt_texts(run_dir: Path, head: StepHead) -> Callable[[Group], str | None]:
    """Return a function that returns a prompt as text, or None where its tokens are those of its messages.

    Raises:
        ConfigurationError: the run's tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer  # not at the top, because it takes seconds

    model = run_dir / "model"
    name = str(model) if model.exists() else str(head.settings.get("model_name") or ModelSettings().model_name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--pairs needs the tokenizer of {name}: {error}") from error

    def text_of(group: Group) -> str | None:
        messages, ids = [message.model_dump() for message in group.prompt.messages], group.prompt_ids
        if messages and tokenizer.chat_template:
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            if tokenizer(rendered, add_special_tokens=False)["input_ids"] == ids:
                return None
        # Without the tokens that the tokenizer adds by itself, as a trainer's will again.
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        return text if tokenizer(text)["input_ids"] == ids else tokenizer.decode(ids)

    return text_of


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
        table.add_row(Text(source or "(all)"), f"{seen:,}", right, f"{account.kept[source]:,}")
    console.print(table)
    for reason, count in sorted(account.left_out.items()):
        if count:
            console.print(Text(f"left out: {count:,} {reason}"))
