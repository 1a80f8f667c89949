"""Compares answers by math-verify. Called only in worker processes, because they can be killed.

Importing this module takes a second: it imports sympy and makes the comparisons that are slow the first time. The fork
server of the workers imports it once for all of them.

math-verify takes any exception for "not equal". An answer that exhausts its memory or the stack would so come back as
wrong, a silent reward of 0, although its verdict is unknown. math-verify's ``raise_on_error`` does not reach its inner
handlers, so ``let_through`` puts a clause before each handler that raises the two exceptions again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

_HANDLER = re.compile(rb"^([ \t]*)except Exception( as \w+)?:", re.MULTILINE)
_RAISE_FIRST = rb"\1except (MemoryError, RecursionError):\n\1    raise\n\1except Exception\2:"


@contextmanager
def let_through(*packages: str) -> Iterator[None]:
    """Compile modules of ``packages`` that are first imported within so that they let the two exceptions through."""
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        if fullname.partition(".")[0] not in packages:
            return original(self, fullname)
        # Bytecode on disk is of the unchanged source, so it is neither read nor written.
        source = _HANDLER.sub(_RAISE_FIRST, self.get_data(self.path))
        code: CodeType = self.source_to_code(source, self.path)
        return code

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]  # inherited from SourceLoader
    try:
        yield
    finally:
        SourceFileLoader.get_code = original  # type: ignore[method-assign]


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
        if any(not isinstance(part, str) for part in boxed):
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
