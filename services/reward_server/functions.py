"""The built-in reward functions that need no worker: exact, cheap, and safe on any text."""

from __future__ import annotations

import re
from fractions import Fraction

from services.reward_server.numbers import quantity

_NUMBER = re.compile(r"(?<![\d.])[-\u2212]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)
_MAX_LINE = 1000


class UnscorableError(Exception):
    """A reward cannot be given; the message says why."""


def first_line_number(response: str, ground_truth: str) -> tuple[float, str | None]:
    """1 where the last number on the response's first line equals the ground truth, else 0; and that number's text."""
    truth = quantity(ground_truth)
    if truth is None:
        raise UnscorableError(f"first_line_number needs a number as ground truth, not {ground_truth[:50]!r}")
    line = response.lstrip().partition("\n")[0][:_MAX_LINE]
    found = _NUMBER.findall(line)
    if not found:
        return 0.0, None
    value = Fraction(found[-1].replace(",", "").replace("\u2212", "-"))
    return float(value == truth.value), found[-1]


def exact_match(response: str, ground_truth: str) -> float:
    """1 where response and ground truth are the same text but for white space around them, else 0."""
    return float(response.strip() == ground_truth.strip())


def overlong(completion_tokens: int | None, max_tokens: int, buffer_tokens: int) -> float:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13).

    0 up to ``max_tokens - buffer_tokens``, then linearly down to -1 at ``max_tokens``, and -1 beyond.
    """
    if completion_tokens is None:
        raise UnscorableError("overlong needs completion_tokens beside the response")
    over = completion_tokens - (max_tokens - buffer_tokens)
    return -min(1.0, max(0.0, over / buffer_tokens))
