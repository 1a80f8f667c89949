"""``grpo chat``: a conversation with a run's model and with the model that it began as.

Each line of stdin is a turn, which both models answer. Each sees its own conversation, in its chat template and with
the run's system prompt. Without a chat template, or with PROMPT_STYLE=plain, each line is a prompt by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from local_runner.directory import all_runs, find_run, shown_path
from services.core import logs
from services.core.errors import ConfigurationError
from services.run_page.directory import RunDirectory

CONFIG = "config.json"


def main(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Id or directory. Default: the newest run below runs/.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens. Default: the run's MAX_NEW_TOKENS.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0: the likeliest token each time.")] = 0.0,
) -> None:
    """Talk to a run's model and to the model that it began as."""

    logs.configure("chat", "error")
    directory = find_run(run)
    start, result = models(directory)
    data = settings_of(directory, "data-server")
    longest = max_new_tokens or longest_answer(directory)
    # Not at the top, since torch takes seconds to import and a run may be named wrongly.
    from local_runner.chat_model import ChatModel

    console = Console(markup=False, highlight=False)
    console.print(f"loading {start} and {shown_path(Path(result))}; then each line that you give is a prompt")
    console.print(f"an answer ends after {longest} tokens at the latest; --max-new-tokens sets another limit")
    both = [ChatModel(model, data) for model in (start, result)]
    with ThreadPoolExecutor(len(both)) as threads:
        for line in lines():
            table = Table(expand=True)
            for title in (start, shown_path(Path(result))):
                table.add_column(title, ratio=1, overflow="fold")
            answers = threads.map(ChatModel.answer, both, repeat(line), repeat(longest), repeat(temperature))
            table.add_row(*(answer or "(ended without a word)" for answer in answers))
            console.print(table)


def models(run_dir: Path) -> tuple[str, str]:
    """Return the model that a run began as, and the directory of the model that it has made.

    Raises:
        ConfigurationError: the run has no model, or does not say which it began as.
    """
    result, start = run_dir / "model", settings_of(run_dir, "ppo-trainer").get("model_name")
    if not (result / CONFIG).is_file():
        there = [path.name for path in all_runs(run_dir.parent) if (path / "model" / CONFIG).is_file()]
        raise ConfigurationError(
            f"{run_dir} has no model/, which a run writes at its end; runs with a model: "
            f"{', '.join(there[:5]) or 'none'}"
        )
    if not start:
        raise ConfigurationError(f"{run_dir}/config.json does not name the model that the run began as")
    return start, str(result)


def longest_answer(run_dir: Path) -> int:
    """Return the most tokens that a run's model sampled for one answer, so that it is asked as it was trained.

    Raises:
        ConfigurationError: the run does not say.
    """
    longest: int | None = settings_of(run_dir, "ppo-trainer").get("max_new_tokens")
    if longest is None:
        raise ConfigurationError(f"{run_dir}/config.json has no MAX_NEW_TOKENS of the trainer; give --max-new-tokens")
    return longest


def settings_of(run_dir: Path, component: str) -> dict[str, Any]:
    """Return a component's settings in a run; empty if the run has none of them."""
    settings: dict[str, Any] = (
        RunDirectory(run_dir.name, run_dir).overview().components.get(component, {}).get("settings", {})
    )
    return settings


def lines() -> Iterator[str]:
    """Yield the lines of stdin that are not empty, with a prompt on a terminal."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line
