"""Scores answers by the reasoning-gym generator that made their question. Called only in worker processes.

Importing this module takes seconds: it imports reasoning-gym and makes each generator once, some of which read files.
The fork server of the workers imports it once for all of them.

Four generators pass an answer to ``eval``, and five to sympy's parser, which does. Here the former read literals only,
and the latter get nothing but arithmetic.
"""

from __future__ import annotations

import ast
import json
import re
import signal
import sys
from typing import Any

import reasoning_gym.factory as gym

from services.protocol.ground_truths import Entry

for _module in ("string_insertion", "spiral_matrix", "binary_matrix"):
    vars(sys.modules[f"reasoning_gym.algorithmic.{_module}"])["eval"] = ast.literal_eval
vars(sys.modules["reasoning_gym.games.n_queens"])["eval"] = ast.literal_eval

_PARSED = frozenset(
    {"countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"}
)
_ARITHMETIC = re.compile(  # a token
    r"(?<!\w)(?:[A-Za-z]|a?(?:sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|Abs|pi)(?!\w)"
    r"|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|[-+*/^()=,\s]",
    re.ASCII,
)
_UNREADABLE = "?"
"""Stands for an answer that must not be parsed."""
_datasets: dict[str, Any] = {}
"""Generators by name and parameters, as JSON."""


def score(answer: str, ground_truth: str) -> float:
    """Return the generator's score of an answer, from 0 to 1; 0 where the scoring fails over the answer.

    Raises:
        ValueError: the ground truth is not an entry of reasoning-gym.
        MemoryError, RecursionError: the scoring needs too much memory, or is nested too deeply.
    """
    entry = Entry.from_json(ground_truth)
    if entry.generator in _PARSED and _ARITHMETIC.sub("", answer):
        answer = _UNREADABLE
    dataset = _dataset(entry.generator, entry.parameters)
    try:
        return float(dataset.score_answer(answer, entry.content))
    except (MemoryError, RecursionError):
        raise
    # A few scorings raise errors of any kind over an answer of the wrong form.
    except Exception:  # noqa: BLE001
        return 0.0


def _dataset(generator: str, parameters: dict[str, Any]) -> Any:
    key = json.dumps([generator, parameters], sort_keys=True)
    if key not in _datasets:
        # Making a generator takes up to half a second, which does not count as the answer's time.
        remaining, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        _datasets[key] = gym.create_dataset(generator, **parameters)
        signal.setitimer(signal.ITIMER_PROF, remaining)
    return _datasets[key]


for _name in sorted(gym.DATASETS.keys() - {"composite"}):
    _dataset(_name, {})
