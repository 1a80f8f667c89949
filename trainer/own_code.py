"""Import the user's functions that AGENT, LOSS and ADVANTAGE name: ``python -m trainer.own_code``."""

from __future__ import annotations

import sys

from services.agents import load_agent
from services.core.errors import exit_code_of
from services.core.imports import load_function
from trainer.config import TrainerSettings


def main() -> None:
    """Import the functions as the trainer does.

    Raises:
        ConfigurationError: a function cannot be imported.
    """
    for variable, name in TrainerSettings.load().own_functions.items():
        load = load_agent if variable.startswith("AGENT") else load_function
        load(variable, name)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
