"""Try what REWARD_FN names, functions and the sandbox: ``python -m services.reward_server.own_code``."""

from __future__ import annotations

import asyncio
import sys

from services.core.errors import exit_code_of
from services.reward_server import pool, worker
from services.reward_server.settings import RewardSettings
from services.sandbox.probe import choose


def main() -> None:
    """Import the functions as a worker process does, and attack the sandbox that the reward `code` would use.

    Raises:
        ConfigurationError: a function cannot be imported, or no sandbox holds on this machine.
    """
    check(RewardSettings.load())


def check(settings: RewardSettings) -> None:
    """Import the functions of every source, and attack the sandbox.

    Raises:
        ConfigurationError: a function cannot be imported, and the message names its source; or no sandbox holds.
    """
    settings.of_sources(lambda own, _: _load(own))
    if "code" in settings.names:
        asyncio.run(choose(settings.sandbox, settings.interpreter, writes=False))


def _load(settings: RewardSettings) -> None:
    try:
        for function in settings.functions:
            if function.is_users:
                worker.load(function.name)
    # The module is the user's and may raise anything.
    except Exception as error:
        raise pool.refusal(settings.reward_fn, worker.reason(error)) from error


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
