"""Arithmetic questions for machines that reach no hub: all of them, split into training and held-out questions."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

HELD_OUT_SHARE = 0.2
_PAIRS_A_LEVEL = 20_000
"""Pairs of operands that a level and operation keeps at most, which bounds the memory of three-digit questions."""


@dataclass(frozen=True)
class Question:
    """A question with its answer and its level, such as ``2-digit +``."""

    question: str
    answer: str
    category: str


def questions(*, digits: list[int], operations: str, template: str, seed: int) -> tuple[list[Question], list[Question]]:
    """Return training and held-out questions, the same for the same arguments.

    The two orders of a sum or product are on one side, so that no held-out question is a training question turned
    round. Differences are never negative.

    Args:
        digits: levels; both operands have that many digits (a zero counts as one).
        operations: some of ``+``, ``-`` and ``*``.
        template: text with the fields ``a``, ``op`` and ``b``.
        seed: decides the split, and the pairs of a level that has too many.
    """
    train: list[Question] = []
    held_out: list[Question] = []
    for level in sorted(set(digits)):
        low, high = (0 if level == 1 else 10 ** (level - 1)), 10**level
        for operation in sorted(set(operations)):
            chooser = random.Random(f"{seed}/{level}/{operation}")
            number_of_pairs = (high - low) * (high - low + 1) // 2
            chosen = chooser.sample(range(number_of_pairs), min(number_of_pairs, _PAIRS_A_LEVEL))
            cut = max(1, round(HELD_OUT_SHARE * len(chosen)))
            for place, code in enumerate(chosen):
                smaller, larger = _pair(code)
                side = held_out if place < cut else train
                side.extend(_ask(low + smaller, low + larger, operation, template, f"{level}-digit {operation}"))
    return train, held_out


def _pair(code: int) -> tuple[int, int]:
    """Return pair number ``code`` of (0, 0), (0, 1), (1, 1), (0, 2), ...: every pair with first <= second once."""
    second = (math.isqrt(8 * code + 1) - 1) // 2
    return code - second * (second + 1) // 2, second


def _ask(smaller: int, larger: int, operation: str, template: str, category: str) -> list[Question]:
    if operation == "-":
        return [Question(template.format(a=larger, op="-", b=smaller), str(larger - smaller), category)]
    orders = {(smaller, larger), (larger, smaller)}
    answer = str(smaller + larger if operation == "+" else smaller * larger)
    return [Question(template.format(a=a, op=operation, b=b), answer, category) for a, b in sorted(orders)]
