"""Try what REWARD_FN names: functions, judge, sandbox: ``python -m services.reward_server.own_code``.

With the FILE of ``python -m services.data_server.look --items FILE`` it also checks that one applies to each row. With
``--answers FORM``, too, it scores a right, an empty and a senseless answer to some rows, and prints JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.core import logs
from services.core.endpoints import Task
from services.core.errors import ConfigurationError, NeverReadyError, exit_code_of
from services.protocol.rewards import RewardItem
from services.reward_server import pool, worker
from services.reward_server.code import tests_of
from services.reward_server.judging import CHECK_SECONDS, judge_of
from services.reward_server.rubric import find_rubric
from services.reward_server.settings import RewardSettings
from services.sandbox.probe import choose

if TYPE_CHECKING:
    from services.reward_server.scoring import Scorer

Function = Callable[[dict[str, Any]], dict[str, Any]]
"""Evaluates an item, as ``worker.load`` makes it."""

APPLIES_SECONDS = 20.0
"""Rows are looked at for so long."""
TRIED_ROWS = 8
"""Rows of each source whose answers are tried; with a judge, which may cost money, JUDGED_ROWS."""
JUDGED_ROWS = 2
TRIED_SECONDS = 20.0
MOST_FAILURES = 12
"""No further row is tried after so long, or after so many answers without a reward."""
NONSENSE = "zvqx 0.000017 wumb"
FORMS = ("{}", "#### {}", "\\boxed{{}}", "<answer>{}</answer>")
"""The forms in which the built-in rewards read an answer, besides that of ``--answers``."""


def main() -> None:
    """Import the functions as a worker process does, and read the rubrics; without a file ask judge and sandbox, too.

    Raises:
        ConfigurationError: a function cannot be imported, no function applies to a row, the judge does not answer,
            or no sandbox holds here.
    """
    settings = RewardSettings.load()
    if "--answers" in sys.argv:
        logs.configure(Task.REWARD_SERVER.value, "error")  # the output is JSON
        print(json.dumps(asyncio.run(_try_answers(settings, Path(sys.argv[1]), sys.argv[3]))))
        return
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
    settings.of_sources(lambda own, source: _load(own, source.name))


def _load(settings: RewardSettings, source: str) -> None:
    find_rubric(settings)
    try:
        functions = [worker.load(function.name) for function in settings.functions if function.is_users]
    # The module is the user's and may raise anything.
    except Exception as error:
        raise pool.refusal(settings.reward_fn, worker.reason(error)) from error
    if len(sys.argv) == 1:
        return
    with open(sys.argv[1], encoding="utf-8") as file:
        items = (entry for entry in map(json.loads, file) if entry[1].pop("source", "") == source)
        if any(function.name == "code" for function in settings.functions):
            _check_tests(items)
        elif len(functions) == len(settings.functions):
            _check_applies(settings.reward_fn, functions, items)


def _check_tests(items: Iterable[Sequence[Any]]) -> None:
    for prompt_id, item, *_ in items:
        try:
            tests_of(item.get("row"), item["ground_truth"])
        except ValueError as error:
            raise ConfigurationError(f"REWARD_FN has `code`, and at prompt {prompt_id} {error}") from error


def _check_applies(reward_fn: str, functions: Sequence[Function], items: Iterable[Sequence[Any]]) -> None:
    """Refuse an item for which each function returns None, as far as APPLIES_SECONDS suffice."""
    end = time.monotonic() + APPLIES_SECONDS
    for prompt_id, item, *_ in itertools.takewhile(lambda _: time.monotonic() < end, items):
        if not any(_applies(function, item) for function in functions):
            raise ConfigurationError(
                f"REWARD_FN {reward_fn!r}: no function applies to prompt {prompt_id}, each returns None for its ground "
                "truth; let one return a number, or leave the row out"
            )


def _applies(function: Function, item: dict[str, Any]) -> bool:
    # One that fails over this answer may apply to others.
    with contextlib.suppress(Exception):
        return function(item).get("applies") is not False
    return True


async def _try_answers(settings: RewardSettings, file: Path, form: str) -> dict[str, Any]:
    """Return the rewards of answers to some rows, by source: ``rows``, ``answers``, ``seconds``, ``failures``.

    A row has the best reward of its right answers, if it has a ground truth, and those of the others; null for no
    reward. ``failures`` has a sentence for each answer without a reward, or one if the judge does not answer.
    """
    from fastapi import FastAPI

    from services.reward_server.app import Rewards

    items: defaultdict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    with file.open(encoding="utf-8") as lines:
        for prompt_id, item, *_ in map(json.loads, lines):
            items[item.get("source", "")].append((prompt_id, item))
    rewards, sources = Rewards(settings, CHECK_SECONDS), settings.by_source()
    found: dict[str, Any] = {}
    try:
        async with rewards.serving(FastAPI()):
            for source, own in sources.items():
                most = JUDGED_ROWS if own.judges else TRIED_ROWS
                chosen = items[source][:: max(1, len(items[source]) // most)][:most]
                found[source] = await _try_rows(rewards.scorers[source], own, chosen, form)
    except NeverReadyError as error:  # the judge, without which the others have not been tried either
        nothing = {"rows": [], "answers": 0, "seconds": 0.0}
        found = {name: nothing | {"failures": [str(error)] if own.judges else []} for name, own in sources.items()}
    return found


async def _try_rows(
    scorer: Scorer, settings: RewardSettings, chosen: Sequence[tuple[str, dict[str, Any]]], form: str
) -> dict[str, Any]:
    """Score the answers to rows of a source, up to the limits of this module."""
    began, answers = time.monotonic(), 0
    rows: list[dict[str, float | None]] = []
    failures: list[str] = []
    for prompt_id, item in chosen:
        truth, forms = item["ground_truth"], dict.fromkeys((form, *FORMS))
        texts = [one.replace("{}", truth) for one in forms] if truth else []
        texts += ["", NONSENSE]
        fields = {"completion_tokens": 1, "finish_reason": "stop"}
        tried = [RewardItem(**item | fields | {"response": text}) for text in texts]
        results = await scorer.score(tried, is_group=settings.is_relative)
        *right, empty, nonsense = (result.reward for result in results)
        known = [reward for reward in right if reward is not None]
        rows.append({"empty": empty, "nonsense": nonsense} | ({"right": max(known, default=None)} if right else {}))
        answers += len(tried)
        failures += [
            f"{result.status.value} for the answer {text[:80]!r} to {prompt_id}: {result.reason}"
            for text, result in zip(texts, results, strict=True)
            if result.reward is None
        ]
        if time.monotonic() - began > TRIED_SECONDS or len(failures) >= MOST_FAILURES:
            break
    return {"rows": rows, "answers": answers, "seconds": time.monotonic() - began, "failures": failures}


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
