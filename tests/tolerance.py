"""Tolerances between numbers that should be equal, by the type of numbers that they were computed in.

tests/conftest.py fixes the type that the tests' engines and trainers compute in, whatever the processor: float32,
unless ENGINE_DTYPE and COMPUTE_TYPE are set. So the whole suite can be run in bfloat16, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

TYPE_VARIABLES = ("ENGINE_DTYPE", "COMPUTE_TYPE")
BOTH_TYPES = ("float32", "bfloat16")

# bfloat16 keeps 8 bits: two orders of adding up make log-probabilities of -10 differ by up to 0.05. Other weights make
# differences of 1 and more.
_LOGPROBS = {"float32": 1e-4, "bfloat16": 0.15}


def both_types(test: Callable[..., Any]) -> Any:
    """Mark a test to run with ``compute_type`` float32 and bfloat16."""
    return pytest.mark.both_types(pytest.mark.parametrize("compute_type", BOTH_TYPES)(test))


def type_in_force(variable: str) -> str:
    """Return the type that the tests' engines (ENGINE_DTYPE) or trainers (COMPUTE_TYPE) compute in."""
    return os.environ[variable]


def logprob_tolerance(*types: str) -> float:
    """Return how far log-probabilities may be apart that were computed in these types."""
    return max(_LOGPROBS[kind] for kind in types)


def engine_tolerance() -> float:
    """Return how far the log-probabilities of the tests' engines may be from those of a float32 model."""
    return logprob_tolerance(type_in_force("ENGINE_DTYPE"))
