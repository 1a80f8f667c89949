"""The GRPO trainer: the algorithm in grpo.py, its settings in config.py, the steps in loop.py."""

import services  # noqa: F401  # first: it says what to install where a package is missing
