"""Reads plain numbers exactly, in the spellings that models use, without floating point.

A text that is not certainly a number is left to math-verify.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 200

_REPLACEMENTS = (
    (re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    # The space sets it apart from a whole number: 1\frac{1}{2} is a mixed number, not 11/2.
    (re.compile(r"\\frac\s*\{\s*([-+]?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}"), r" \1/\2 "),
    (re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)"), r" \1/\2 "),
    (re.compile(r"\\left|\\right|\\displaystyle|\\[()\[\]]|(?<![\w)])\*\*|\*\*(?![\w(])|__|`"), ""),
    (re.compile(r"\{,\}"), ","),
    # Spaces within a number, and LaTeX's in general.
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|[\u00a0\u2009\u202f~])(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\[,;:! ]|[\u00a0\u2009\u202f~]|\\quad"), " "),
    (re.compile(r"\\?%"), " % "),
    (re.compile(r"\\?[$€£¥₹]"), " $ "),
    (re.compile(r"\^\s*+(?:\{\s*+)?\\circ\s*+\}?|°|\\degree"), " degrees "),
    (re.compile("[−–‒﹣－]"), "-"),  # noqa: RUF001  # these are the minus signs that models write
)

# Full-width digits and signs as East Asian keyboards give them, and fractions that are one character.
_PLAIN = {code - 0x20 + 0xFF00: chr(code) for code in map(ord, "0123456789.,/%+")} | {
    code: " " + unicodedata.normalize("NFKC", chr(code)).replace("\u2044", "/")
    for code in (*range(0xBC, 0xBF), *range(0x2150, 0x215F))
}

_DIGITS = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}|\d{1,3}(?: \d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"""
    (?P<before>(?:[A-Za-z][A-Za-z']++[ ,]*+)*:?)       # words such as "about", or "Answer:"
    \s*(?P<sign>[-+]?)\s*\$?\s*(?P<inner_sign>[-+]?)
    (?:
        (?P<whole>\d{{1,3}}(?:,\d{{3}})+|\d+)\s+(?P<part>\d+)\s?/\s?(?P<parts>\d+)      # a mixed number
        |(?P<number>{_DIGITS})(?:[eE](?P<exponent>[-+]?\d{{1,3}})|\s?/\s?(?P<over>\d+(?:\.\d+)?))?
    )
    (?P<attached>[A-Za-z]*)
    (?P<after>(?:\s+(?:\$|%|[A-Za-z][A-Za-z'.]*(?:-[A-Za-z]+)*(?:/[A-Za-z]+)*(?:\^\{{?[23]\}}?|[²³])?))*)
    [\s.,;?$]*+
    """,
    re.VERBOSE | re.ASCII,
)
_UNIT_NAMES = (
    "km cm mm nm kg mg ml mL lb lbs oz ft in mi mph kph kmh hr hrs h min mins sec secs s m g L l st nd rd th USD EUR"
)
_UNITS = frozenset(_UNIT_NAMES.split())
# A single character is a variable unless it is one of these.
_LETTERS = frozenset("mghsLlaA$%")
_SCALES = {
    "%": Fraction(1, 100),
    "percent": Fraction(1, 100),
    "percents": Fraction(1, 100),
    "hundred": Fraction(100),
    "thousand": Fraction(10**3),
    "k": Fraction(10**3),
    "K": Fraction(10**3),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
    "dozen": Fraction(12),
}
# Words that make an expression of a number.
_OPERATOR_NAMES = (
    "or and to plus minus times over divided multiplied by pi sqrt root square squared cubed half halves third thirds "
    "quarter quarters twice double triple negative log ln sin cos tan exp mod power factorial not than"
)
_OPERATORS = frozenset(_OPERATOR_NAMES.split())
# The left side of an equation that only names the right side: f(2), \\angle ABC, the total; not 3x, x + y, \\sqrt{x}.
_NAME = re.compile(
    r"(?!\s*\\sqrt)(?:\s*+\\?[A-Za-z][A-Za-z']*+)+\s*+(?:_\w|_\{[^{}]{1,20}\}|\{[A-Za-z]+\}|\([^()]{0,20}\))*\s*+:?"
)
_SOLUTIONS = re.compile(r"\b([A-Za-z])\s*=[^=]{1,50}(?:[,;]|\bor\b|\band\b)\s*\1\s*=")
_TIME = re.compile(r"\s*(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*(?:([aApP])\.?\s*[mM]\.?)?[\s.]*")


@dataclass(frozen=True)
class Quantity:
    """An exact number, and the factor of the unit written behind it: 1/100 for %, 10**6 for million."""

    value: Fraction
    factor: Fraction | None = None

    def agrees(self, truth: Quantity) -> bool:
        """Return whether the two are the same number. A factor of only one of them is optional: 50% is 50 or 0.5."""
        if self.value * (self.factor or 1) == truth.value * (truth.factor or 1):
            return True
        return self.value == truth.value and None in (self.factor, truth.factor)


def plain(text: str) -> str:
    """Return ``text`` with full-width digits as ordinary ones, and with one half as 1/2."""
    return text if text.isascii() else text.translate(_PLAIN)


def clean(text: str) -> str:
    """Return ``text`` without the LaTeX and Markdown that surrounds numbers."""
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text.strip()


def right_side(text: str, *, named: bool = True) -> str:
    """Return the right side of an equation, with ``named`` only where the left side is a name; else nothing."""
    left, equals, right = text.rpartition("=")
    is_other = left.endswith(("<", ">", "!")) or _SOLUTIONS.search(text)
    return "" if equals and (is_other or (named and not _NAME.fullmatch(left.partition("=")[0]))) else right


def quantity(text: str, *, named: bool = True) -> Quantity | None:
    """Read a number, perhaps with words, x = or a unit beside it; None where the text is not certainly a number."""
    if len(text) > MAX_LENGTH:
        return None
    match = _NUMBER.fullmatch(right_side(clean(text), named=named).strip())
    if match is None:
        return None
    words_before = match["before"].lower().replace(",", " ").rstrip(":").split()
    sign = -1 if (match["sign"] == "-") != (match["inner_sign"] == "-") else 1
    if words_before and words_before[-1] in ("negative", "minus"):
        sign, words_before = -sign, words_before[:-1]
    words_after = match["after"].split()
    attached = match["attached"]
    if attached and attached not in _UNITS and attached not in _SCALES:
        return None
    variables = [word for word in words_after if len(word) == 1 and word not in _LETTERS]
    if variables or not _OPERATORS.isdisjoint([*words_before, *map(str.lower, words_after)]):
        return None
    value = _value(match)
    if value is None:
        return None
    scales = [_SCALES.get(word) or _SCALES.get(word.lower()) for word in (attached, *words_after)]
    factors = [scale for scale in scales if scale is not None]
    return Quantity(sign * value, math.prod(factors, start=Fraction(1)) if factors else None)


def time_of_day(text: str) -> tuple[int, int, int, str] | None:
    """Return hour, minute, second and ``a``, ``p`` or nothing of a text such as ``2:30 pm``; None for another text."""
    match = _TIME.fullmatch(clean(text)) if len(text) <= MAX_LENGTH else None
    if match is None:
        return None
    return int(match[1]), int(match[2]), int(match[3] or 0), (match[4] or "").lower()


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the number of a match without its sign; None for 1/0, and for 1 100/200, which has two readings."""
    if match["whole"] is not None:
        part, parts = int(match["part"]), int(match["parts"])
        may_be_grouped = len(match["part"]) == 3
        return _fraction(match["whole"]) + Fraction(part, parts) if 0 < part < parts and not may_be_grouped else None
    value = _fraction(match["number"])
    if match["exponent"] is not None:
        return value * Fraction(10) ** int(match["exponent"])
    if match["over"] is not None:
        over = Fraction(match["over"])
        return value / over if over else None
    return value


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", "").rstrip("."))
