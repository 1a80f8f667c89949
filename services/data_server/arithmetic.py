"""Arithmetic questions for machines that reach no hub: all of them, split into training and held-out ones."""

from __future__ import annotations

import random
from dataclasses import dataclass

HELD_OUT_SHARE = 0.2


@dataclass(frozen=True)
class Question:
    """A question with its answer and level."""

    text: str
    answer: str
    category: str


def questions(
    *, digits: list[int], operations: str, template: str, seed: int, most_a_level: int = 20_000
) -> tuple[list[Question], list[Question]]:
    """Training and held-out questions, the same for the same arguments.

    The two orders of a sum or product are on one side, so that no held-out question is a training question turned
    round. Differences are never negative.

    Args:
        digits: levels; both operands have that many digits (a zero counts as one).
        operations: of ``+``, ``-`` and ``*``.
        template: with the fields ``a``, ``op`` and ``b``.
        seed: of the split.
        most_a_level: how many pairs a level keeps at most, chosen by the seed.
    """
    train: list[Question] = []
    held_out: list[Question] = []
    for level in sorted(set(digits)):
        low, high = (0 if level == 1 else 10 ** (level - 1)), 10**level
        for operation in sorted(set(operations)):
            chooser = random.Random(f"{seed}/{level}/{operation}")
            number_of_pairs = (high - low) * (high - low + 1) // 2
            chosen = chooser.sample(range(number_of_pairs), min(number_of_pairs, most_a_level))
            cut = max(1, round(HELD_OUT_SHARE * len(chosen)))
            for place, code in enumerate(chosen):
                smaller, larger = _pair(code)
                side = held_out if place < cut else train
                side.extend(_asked(low + smaller, low + larger, operation, template, f"{level}-digit {operation}"))
    return train, held_out


def _pair(code: int) -> tuple[int, int]:
    """The ``code``-th of (0, 0), (0, 1), (1, 1), (0, 2), ...: every pair with first <= second once."""
    second = int((2 * code + 0.25) ** 0.5 - 0.5)
    while (second + 1) * (second + 2) // 2 <= code:
        second += 1
    while second * (second + 1) // 2 > code:
        second -= 1
    return code - second * (second + 1) // 2, second


def _asked(smaller: int, larger: int, operation: str, template: str, category: str) -> list[Question]:
    if operation == "-":
        return [Question(template.format(a=larger, op="-", b=smaller), str(larger - smaller), category)]
    orders = {(smaller, larger), (larger, smaller)}
    answer = str(smaller + larger if operation == "+" else smaller * larger)
    return [Question(template.format(a=a, op=operation, b=b), answer, category) for a, b in sorted(orders)]
