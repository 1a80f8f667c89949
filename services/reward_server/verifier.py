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
    from latex2sympy2_extended.math_normalization import extract_boxed_content, normalize_latex
    from latex2sympy2_extended import is_expr_of_only_symbols
    from math_verify import LatexExtractionConfig, grader, verify
    from math_verify.parser import parse_latex_cached

# It warns that its own timeouts are off. The worker's limits take their place.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_LONGEST_EXPRESSION = 1000
"""Longer texts are prose that contains an answer."""
_FORMULA = re.compile(r"(?<!\\)(?:\$\$(.+?)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\])", re.DOTALL)
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or)\b)[A-Za-z]{2,}")
# Its own list of units has the variables a, b, c, d, t and the products ab and bc.
_NORMALIZATION = replace(LatexExtractionConfig().normalization_config, boxed="none", units=False)

_ROOT = re.compile(r"([√∛])\s?(?:\(((?:[^()]|\([^()]*\))*)\)|(\d+(?:\.\d+)?|[^\W\d_]|∞)|)")
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴-⁹⁺⁻⁼⁽⁾ⁿⁱ]+"), re.compile("[₀-₉₊₋₌₍₎ₐₑₒₓₕ-ₜᵢⱼ]+")
_SYMBOLS = str.maketrans(
    {
        "∞": r"\infty ",
        "∅": r"\emptyset ",
        "∈": r"\in ",
        "·": r"\cdot ",
        "⁄": "/",
        "−": "-",
        "°": r"^{\circ}",
        "→": r"\to ",
    }
    | {"º": r"^{\circ}", "˚": r"^{\circ}", "′": "'", "∠": r"\angle ", "≠": r"\neq ", "∓": r"\pm ", "⌊": r"\lfloor "}
    | {"⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "∣": "|"}
    | {letter: rf"\mathbb{{{plain_letter}}}" for letter, plain_letter in zip("ℕℤℚℝℂ", "NZQRC", strict=True)}
)
_SPELLINGS = (
    (re.compile(r"(?<!\\)(?:\\[()\[\]]|\$+|\\?\")"), " "),
    (re.compile(r"\\varnothing|\\\{\s*\\\}|\\lbrace\s*\\rbrace"), r"\\emptyset "),
    (re.compile(r"\\(?:mathrm|text|textrm|operatorname)\s*\{\s*([ei])\s*\}"), r" \1 "),
    # The parser would leave these out: dots, and the prime of a derivative.
    (re.compile(r"\\[lc]?dots[a-z]?(?![A-Za-z])|\.\.\."), r"\\dots "),
    (re.compile(r"(?<![A-Za-z])([A-Za-z])'(?![A-Za-z'])"), r"\1^{\\prime}"),
    (re.compile(r"(?<![A-Za-z])([A-Za-z])''(?![A-Za-z'])"), r"\1^{\\prime\\prime}"),
    # Units behind a number.
    (
        re.compile(
            r"(?:(?<=[\d})])|(?<=\\pi))(?:(?:\s|\\[,;:! ]|~)*\\(?:text(?:rm|bf|it|normal)?|mbox|mathrm)\s*\{[A-Za-z /.]*\}"
            r"|(?:\s|\\[,;:! ]|~)+(?!(?:per\s?cent|pct))(?:[A-Za-z]{3,}|cm|mm|km|kg|ft|in|m|g|s|h|l|L)(?: [A-Za-z]{2,})*"
            r"|cm|mm|km|kg)(?:\^\{?[23]\}?)?[\s.]*$"
        ),
        "",
    ),
)


def _latex(text: str) -> str:
    """Return ``text`` in the LaTeX that the parser reads whole: symbols as commands, and no units behind numbers."""
    text = plain(extract_boxed_content(text))
    if not text.isascii():
        text = _ROOT.sub(
            lambda m: rf"\sqrt{'[3]' if m[1] == '∛' else ''}{{{m[2] or m[3]}}}" if m[2] or m[3] else r"\sqrt ", text
        )
        text = _RAISED.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
        text = _LOWERED.sub(lambda m: "_{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
        text = unicodedata.normalize("NFKC", text.translate(_SYMBOLS)).translate(_SYMBOLS)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text.strip(" .,;\n")


def _is_name(side: Any) -> bool:
    """Return whether the left side of an equation names the right side, as f(x) and AB, unlike x + y and x/2."""
    return is_expr_of_only_symbols(side) and not side.has(sympy.Add) and side.atoms(sympy.Number) <= {-1}


def _are_equal(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Compare by math-verify, and small numbers again: it neglects 1e-15, and 1e-6 beside a decimal, whatever they are."""
    is_equal = bool(_numeric_eq(a, b, float_rounding, numeric_precision))
    if not is_equal or a.is_Matrix:
        return is_equal
    size = min((abs(n) for side in (a, b) for n in side.evalf().atoms(sympy.Float) if n), default=1)
    most = size * (1e-2 if isinstance(a, sympy.Float) or isinstance(b, sympy.Float) else 1e-12)
    return size > 1e-3 or all(abs(n) <= most for n in (a - b).evalf().atoms(sympy.Float))


def _solve(*arguments: Any) -> Any:
    """Solve for math-verify, which takes two equations without solutions for the same."""
    solutions = sympy.solve(*arguments)
    if solutions in ([], False):
        raise ValueError("there is no solution to compare")
    return solutions


_numeric_eq = grader.sympy_numeric_eq
grader.sympy_numeric_eq, grader.solve, grader.is_expr_of_only_symbols = _are_equal, _solve, _is_name


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
    latex = _latex(text)
    expressions = [_latex("".join(groups)) for groups in _FORMULA.findall(text)][-1:]
    if len(text) <= _LONGEST_EXPRESSION and not (expressions and _WORD.search(_FORMULA.sub(" ", text))):
        expressions.insert(0, latex)
    for expression in expressions:
        try:
            return parse_latex_cached(normalize_latex(expression, _NORMALIZATION))
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001, S112  # whatever the parser raises at what it cannot read
            continue
    return normal_text(latex)


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
