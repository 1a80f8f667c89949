"""The GRPO trainer: the formulas in algorithm/, the settings in config/, the steps in loop.py."""

import services  # noqa: F401  # first: it says what to install where a package is missing
