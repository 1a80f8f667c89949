"""``grpo chat``: a conversation with a run's model and with the model that it began as.

Each line of stdin is a turn, which both models answer. Each sees its own conversation, in its chat template and with
the run's system prompt. Without a chat template, or with PROMPT_STYLE=plain, each line is a prompt by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from local_runner.launch import shown_path
from local_runner.status import RunName
from services.core import logs
from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.core.files import read_records
from services.run_page.directory import Run, all_runs, find_run

CONFIG = "config.json"
CONTEXT_TOKENS = 8192
"""The most tokens of a conversation; each engine has a cache of this size."""


def main(
    run: RunName = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer; default: the run's.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0: the likeliest token each time.")] = 0.0,
) -> None:
    """Talk to a run's model and to the model that it began as."""

    logs.configure("chat", "error")
    found = find_run(run)
    start, result = models(found)
    longest = max_new_tokens or found.settings(Task.TRAINER).get("max_new_tokens")
    if longest is None:
        raise ConfigurationError(f"{found.path}/{CONFIG} has no MAX_NEW_TOKENS of the trainer; give --max-new-tokens")
    titles = (start, shown_path(found.path / "model"))
    console = Console(markup=False, highlight=False)
    console.print(f"loading {titles[0]} and {titles[1]}; then each line that you give is a prompt")
    console.print(f"an answer ends after {longest} tokens at the latest; --max-new-tokens sets another limit")
    for record in read_records(found.path / "samples.jsonl")[:1]:
        console.print(f"a prompt of the run: {record['prompt']!r}", soft_wrap=True)
    both = [ChatModel(model, found.settings(Task.DATA_SERVER)) for model in (start, result)]
    with ThreadPoolExecutor(len(both)) as threads:
        for line in lines():
            table = Table(expand=True)
            for title in titles:
                table.add_column(title, ratio=1, overflow="fold")
            answers = threads.map(ChatModel.answer, both, repeat(line), repeat(longest), repeat(temperature))
            table.add_row(*(answer or "(ended without a word)" for answer in answers))
            console.print(table)


def models(run: Run) -> tuple[str, str]:
    """Return the model that a run began as, and the directory of the model that it has made.

    Raises:
        ConfigurationError: the run has no model, or does not say which it began as.
    """
    result, start = run.path / "model", run.settings(Task.TRAINER).get("model_name")
    if not (result / CONFIG).is_file():
        there = [other.name for other in all_runs(run.path.parent) if (other.path / "model" / CONFIG).is_file()]
        problem = f"{run.path} has no model/, which a run writes at its end"
        raise ConfigurationError(f"{problem}; runs with a model: {', '.join(there[:5]) or 'none'}")
    if not start:
        raise ConfigurationError(f"{run.path}/{CONFIG} does not name the model that the run began as")
    return start, str(result)


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


class ChatModel:
    """A model with an embedded engine of its own in this process, and its side of the conversation."""

    def __init__(self, model: str, data: dict[str, Any]) -> None:
        """Load a model.

        Args:
            model: a hub name or directory.
            data: the settings of the run's data-server.

        Raises:
            ConfigurationError: the model cannot be loaded.
        """
        # Not at the top, since torch takes seconds to import and a run may be named wrongly.
        from services.embedded_engine.engine import Engine
        from services.embedded_engine.loading import load
        from services.engines.settings import EngineSettings

        self._loaded = load(
            EngineSettings.load(model_name=model, engine_max_running_requests=1, engine_max_total_tokens=CONTEXT_TOKENS)
        )
        self._is_chat = bool(self._loaded.tokenizer.chat_template) and data.get("prompt_style") != "plain"
        self._template_args = data.get("chat_template_args") or {}
        system = data.get("system_prompt")
        self.messages = [{"role": "system", "content": system}] if system else []
        """The conversation so far."""
        self._engine = Engine(self._loaded, on_failure=lambda _: None)
        self._engine.start()

    def answer(self, line: str, max_new_tokens: int, temperature: float) -> str:
        """Return the answer to a line, or the engine's refusal, such as of a conversation that is too long."""
        from services.embedded_engine.requests import SamplingParams, completion_text, make_request
        from services.http.problems import ProblemError

        turn = {"role": "user", "content": line}
        try:
            if self._is_chat:
                prompts = self._loaded.prompts
                ids = prompts.codec.encode(prompts.render([*self.messages, turn], None, self._template_args))
            else:
                ids = self._loaded.encode(line)
            params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
            request = make_request(ids, params, self._loaded)
        except ProblemError as error:
            return f"error: {error.detail}"
        self._engine.submit(request)
        answer = completion_text(request.done.result().sequences[0], self._loaded)
        if self._is_chat:
            self.messages += [turn, {"role": "assistant", "content": answer}]
        return answer
