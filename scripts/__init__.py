"""Commands that a person runs: a job group on this machine, its runs, evaluations, and makers of small models."""

import services  # noqa: F401  # first, because it explains missing packages
