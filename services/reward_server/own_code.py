"""Import the functions that REWARD_FN names, and ask its judge: ``python -m services.reward_server.own_code``."""

from __future__ import annotations

import asyncio
import sys

from services.core.errors import exit_code_of
from services.reward_server import pool, worker
from services.reward_server.judging import judge_of
from services.reward_server.rubric import find_rubric
from services.reward_server.settings import RewardSettings


def main() -> None:
    """Import the functions as a worker process does, read the rubrics, and ask the judge a question.

    Raises:
        ConfigurationError: a function cannot be imported, or the judge lacks something or is none.
    """
    settings = RewardSettings.load()
    check(settings)
    if (judge := judge_of(settings)) is not None:
        asyncio.run(judge.check())


def check(settings: RewardSettings) -> None:
    """Import the functions of every source, and read its rubric.

    Raises:
        ConfigurationError: a function cannot be imported, or a rubric is not one; the message names the source.
    """
    settings.of_sources(lambda own, _: _load(own))


def _load(settings: RewardSettings) -> None:
    find_rubric(settings)
    try:
        for function in settings.functions:
            if function.is_users:
                worker.load(function.name)
    # The module is the user's and may raise anything.
    except Exception as error:
        raise pool.refusal(settings.reward_fn, worker.reason(error)) from error


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
