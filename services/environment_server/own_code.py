"""Make the user's environment that ENVIRONMENT names: ``python -m services.environment_server.own_code``."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

from services.core.errors import exit_code_of
from services.environment_server.catalogue import open_with_trial
from services.environment_server.settings import EnvironmentSettings


async def main() -> None:
    """Make the environments as the server does at its start.

    Raises:
        ConfigurationError: one cannot be made.
    """
    settings = EnvironmentSettings.load()
    for variable, name in settings.own_functions.items():
        async with AsyncExitStack() as stack:
            _, trial = await open_with_trial(settings.model_copy(update={"environment": name}), stack, variable)
            trial.close()


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: asyncio.run(main())))
