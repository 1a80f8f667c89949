"""Try what REWARD_FN names: functions, judge, sandbox: ``python -m services.reward_server.own_code``.

With the FILE of ``python -m services.data_server.look --items FILE`` it also checks that one applies to each row.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from services.core.errors import ConfigurationError, exit_code_of
from services.reward_server import pool, worker
from services.reward_server.code import tests_of
from services.reward_server.judging import judge_of
from services.reward_server.rubric import find_rubric
from services.reward_server.settings import RewardSettings
from services.sandbox.probe import choose

APPLIES_SECONDS = 20.0
"""Rows are looked at for so long."""


def main() -> None:
    """Import the functions as a worker process does, and read the rubrics; without a file ask judge and sandbox, too.

    Raises:
        ConfigurationError: a function cannot be imported, no function applies to a row, the judge does not answer,
            or no sandbox holds here.
    """
    settings = RewardSettings.load()
    check(settings)
    if len(sys.argv) > 1:
        return
    if (judge := judge_of(settings)) is not None:
        asyncio.run(judge.check())
    if "code" in settings.names:
        asyncio.run(choose(settings.sandbox, settings.interpreter, writes=False))


def check(settings: RewardSettings) -> None:
    """Import the functions of every source, read its rubric, and look at the rows in the file of the command line.

    Raises:
        ConfigurationError: a function cannot be imported, none applies to a row, or a rubric is not valid; the message
            names its source.
    """
    settings.of_sources(lambda own, source: _load(own, source.name if source else ""))


def _load(settings: RewardSettings, source: str) -> None:
    find_rubric(settings)
    try:
        functions = [worker.load(function.name) for function in settings.functions if function.is_users]
    # The module is the user's and may raise anything.
    except Exception as error:
        raise pool.refusal(settings.reward_fn, worker.reason(error)) from error
    if len(sys.argv) == 1:
        return
    with open(sys.argv[1]) as file:
        items = (entry for entry in map(json.loads, file) if entry[1].pop("source", "") == source)
        if any(function.name == "code" for function in settings.functions):
            _check_tests(items)
        elif len(functions) == len(settings.functions):
            check_applies(settings.reward_fn, functions, items)


def _check_tests(items: Iterable[tuple[str, dict[str, Any]]]) -> None:
    for prompt_id, item in items:
        try:
            tests_of(item.get("row"), item["ground_truth"])
        except ValueError as error:
            raise ConfigurationError(f"REWARD_FN has `code`, and at prompt {prompt_id} {error}") from error


def check_applies(
    reward_fn: str,
    functions: Iterable[Callable[[dict[str, Any]], dict[str, Any]]],
    items: Iterable[tuple[str, dict[str, Any]]],
) -> None:
    """Check that a function applies to each item, given with the id of its prompt, as far as APPLIES_SECONDS suffice.

    Raises:
        ConfigurationError: each function returns None for an item.
    """
    end = time.monotonic() + APPLIES_SECONDS
    for prompt_id, item in items:
        if not any(_applies(function, item) for function in functions):
            raise ConfigurationError(
                f"REWARD_FN {reward_fn!r}: no function applies to prompt {prompt_id}, each returns None for its ground "
                "truth; let one return a number, or leave the row out"
            )
        if time.monotonic() > end:
            return


def _applies(function: Callable[[dict[str, Any]], dict[str, Any]], item: dict[str, Any]) -> bool:
    # One that fails over this answer may apply to others.
    with contextlib.suppress(Exception):
        return function(item).get("applies") is not False
    return True


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
