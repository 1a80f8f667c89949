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
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from services.core.numbers import plain
from services.reward_server.answers import normal_text

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
    import sympy
    from latex2sympy2_extended import is_expr_of_only_symbols
    from latex2sympy2_extended.math_normalization import extract_boxed_content, normalize_latex
    from math_verify import LatexExtractionConfig, grader, verify
    from math_verify.parser import parse_latex_cached

# It warns that its own timeouts are off. The worker's limits take their place.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_LONGEST_EXPRESSION = 1000
"""Longer texts are prose that contains an answer."""
_FORMULA = re.compile(r"(?<!\\)(?:\$\$(.+?)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\])", re.DOTALL)
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or)\b)[A-Za-z]{2,}")
# Among its units are the variables a, b, c, d and t, and the products ab and bc.
_NORMALIZATION = replace(LatexExtractionConfig().normalization_config, boxed="none", units=False)
_RADICAND = r"\s?(?:\(((?:[^()]|\([^()]*\))*)\)|(\d+(?:\.\d+)?|[^\W\d_]))"
_NAMES = r"""∞ \infty ∅ \emptyset ∈ \in · \cdot → \to ∠ \angle ≠ \neq ∓ \pm ⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉ \rceil
    √ \sqrt ∑ \sum ∏ \prod ∫ \int ⁄ / − - ° ^{\circ} º ^{\circ} ℕ \mathbb{N} ℤ \mathbb{Z} ℚ \mathbb{Q} ℝ \mathbb{R}"""  # noqa: RUF001
_SYMBOLS = {ord(symbol): name + " " for symbol, name in re.findall(r"(\S+) (\S+)", _NAMES)}
_SPELLINGS = {
    f"√{_RADICAND}": r"\\sqrt{\1\2}",
    f"∛{_RADICAND}": r"\\sqrt[3]{\1\2}",
    "([⁰¹²³⁴-⁹⁺⁻⁼⁽⁾ⁿⁱ]+)": r"^{\1}",
    "([₀-₉₊₋₌₍₎ₐₑₒₓₕ-ₜᵢⱼ]+)": r"_{\1}",
    r"(?<!\\)(?:\\[()\[\]]|\$+|\\?\")": " ",
    r"\\varnothing|\\\{\s*\\\}|\\lbrace\s*\\rbrace": r"\\emptyset ",
    r"(?<=[\w)])\*\*(?=[\w(])": "^",
    r"\\(?:mathrm|text|textrm|operatorname)\s*\{\s*([ei])\s*\}": r" \1 ",
    # The parser would leave out dots and the prime of a derivative.
    r"\\[lc]?dots[a-z]?(?![A-Za-z])|\.\.\.|…": r"\\dots ",
    r"(?<![A-Za-z]{2})(?<=[A-Za-z'\u2032])['\u2032](?![A-Za-z])": r"^{\\prime}",
    # Units behind a number.
    r"(?:(?<=[\d})π])|(?<=\\pi))(?:(?:[\s~]|\\[,;:! ])*\\(?:text[a-z]*|mbox|mathrm)\s*\{[A-Za-z /.]*\}|[ckm]m|kg|"
    r"(?:[\s~]|\\[,;:! ])+(?!perc|pct)(?:[A-Za-z]{3,}|[ckm]m|kg|ft|in|[mgshlL])(?: [A-Za-z]{2,})*)"
    r"(?:\^\{?[23²³]\}?)?[\s.]*$": "",
}


def _latex(text: str) -> str:
    """Return ``text`` in the LaTeX that the parser reads whole: symbols as commands, and no units behind numbers."""
    text = plain(text)
    for pattern, replacement in _SPELLINGS.items():
        text = re.sub(pattern, replacement, text)
    return unicodedata.normalize("NFKC", text.translate(_SYMBOLS)).translate(_SYMBOLS).strip(" .,;\n")


def _is_name(side: Any) -> bool:
    """Return whether the left side of an equation names the right side, as f(x) and AB do, unlike x + y and x/2."""
    return is_expr_of_only_symbols(side) and not side.has(sympy.Add) and side.atoms(sympy.Number) <= {-1}


def _is_equal(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Compare by math-verify, and small values also by their ratio: it neglects 1e-15, and 1e-6 beside a decimal."""
    is_equal: bool = _numeric_eq(a, b, float_rounding, numeric_precision)
    if not is_equal or a.is_Matrix:
        return is_equal
    size = min((abs(n) for side in (a, b) for n in side.evalf().atoms(sympy.Float) if n), default=1)
    most = size * (1e-2 if isinstance(a, sympy.Float) or isinstance(b, sympy.Float) else 1e-12)
    return size > 1e-3 or all(abs(n) <= most for n in (a - b).evalf().atoms(sympy.Float))


def _solve(*arguments: Any) -> Any:
    """Solve for math-verify, which takes two equations without solutions for the same."""
    if (solutions := sympy.solve(*arguments)) in ([], False):
        raise ValueError("there is no solution to compare")
    return solutions


_numeric_eq = grader.sympy_numeric_eq
grader.sympy_numeric_eq, grader.solve, grader.is_expr_of_only_symbols = _is_equal, _solve, _is_name


def is_equal(answer: str, ground_truth: str) -> bool:
    """Return whether math-verify finds an answer equal to the ground truth, each read as a whole.

    Raises:
        MemoryError: the comparison needs too much memory.
        RecursionError: an expression is nested too deeply.
    """
    if normal_text(_latex(answer)) == normal_text(_latex(ground_truth)) != "":
        return True
    return bool(verify(_parse_truth(ground_truth), _parse(answer), timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parse_truth(text: str) -> Any:
    return _parse(text)


def _parse(text: str) -> Any:
    """Return the expression that a text is, or the last formula in prose; else the text, which equals only itself."""
    text = extract_boxed_content(text)
    expressions = [_latex("".join(groups)) for groups in _FORMULA.findall(text)[-1:]]
    if len(text) <= _LONGEST_EXPRESSION and not (expressions and _WORD.search(_FORMULA.sub(" ", text))):
        expressions.insert(0, _latex(text))
    for expression in expressions:
        try:
            return parse_latex_cached(normalize_latex(expression, _NORMALIZATION))
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001  # whatever the parser raises at what it cannot read
            continue
    return normal_text(expressions[0] if expressions else _latex(text))


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
