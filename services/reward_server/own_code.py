"""Import the user's functions that REWARD_FN names: ``python -m services.reward_server.own_code``."""

from __future__ import annotations

import sys

from services.core.errors import exit_code_of
from services.reward_server import pool, worker
from services.reward_server.settings import RewardSettings


def main() -> None:
    """Import the functions as a worker process does.

    Raises:
        ConfigurationError: a function cannot be imported.
    """
    check(RewardSettings.load())


def check(settings: RewardSettings) -> None:
    """Import the functions of every source.

    Raises:
        ConfigurationError: a function cannot be imported; the message names its source.
    """
    settings.of_sources(lambda own, _: _load(own))


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
