"""math-verify, for what exact arithmetic cannot decide. Only ever called in a worker process that can be killed.

Importing this module imports sympy and runs what is slow the first time, a second in all; the fork server of the
workers does so once.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from services.reward_server.reraise import let_through

with let_through("math_verify", "latex2sympy2_extended"):
    from math_verify import parse, verify

# It warns that its own timeouts are off; the worker's limits stand in for them.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

# Longer texts are prose with an answer somewhere in it.
_LONGEST_EXPRESSION = 1000


def is_equal(answer: str, ground_truth: str) -> bool:
    """Whether math-verify holds an answer for equal to the ground truth.

    Raises:
        MemoryError: it needed too much memory.
        RecursionError: it is nested too deeply.
    """
    return bool(verify(_parse_truth(ground_truth), _parse(answer), timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parse_truth(text: str) -> list[Any]:
    return _parse(text)


def _parse(text: str) -> list[Any]:
    boxed: list[Any] = []
    if len(text) <= _LONGEST_EXPRESSION:
        # As the content of one box: of a bare text it would take the last number only.
        boxed = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
        if any(not isinstance(found, str) for found in boxed):
            return boxed
    plain: list[Any] = parse(text, parsing_timeout=None)
    return plain or boxed


# Grammars are built and caches filled by the first use, which no answer shall pay for.
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
