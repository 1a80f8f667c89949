"""Compares answers by math-verify. Called only in worker processes, because they can be killed.

Importing this module takes a second: it imports sympy and makes the comparisons that are slow the first time. The fork
server of the workers imports it once for all of them.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from services.reward_server.reraise import let_through

with let_through("math_verify", "latex2sympy2_extended"):
    from math_verify import parse, verify

# It warns that its own timeouts are off. The worker's limits take their place.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_LONGEST_EXPRESSION = 1000
"""Longer texts are prose that contains an answer."""


def is_equal(answer: str, ground_truth: str) -> bool:
    """Return whether math-verify finds an answer equal to the ground truth.

    Raises:
        MemoryError: the comparison needs too much memory.
        RecursionError: an expression is nested too deeply.
    """
    return bool(verify(_parse_truth(ground_truth), _parse(answer), timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parse_truth(text: str) -> list[Any]:
    return _parse(text)


def _parse(text: str) -> list[Any]:
    boxed: list[Any] = []
    if len(text) <= _LONGEST_EXPRESSION:
        # In a box the whole text is one expression. Of a bare text math-verify would take only the last number.
        boxed = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
        if any(not isinstance(found, str) for found in boxed):
            return boxed
    plain: list[Any] = parse(text, parsing_timeout=None)
    return plain or boxed


# The first use builds grammars and fills caches, which would count towards the limits of the first answer.
for _answer, _truth in (
    (r"\frac{1}{2} + x^2", "0.5 + x^{2}"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\{1, 2\}", "(1, 2)"),
    ("x^2 + 2x + 1", "(x+1)^2"),
    (r"\sin^2 x + \cos^2 x", "1"),
    (r"\frac{2}{7}", "0.3"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    ("x > 3", r"(3, \infty)"),
):
    is_equal(_answer, _truth)
