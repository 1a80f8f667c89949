from __future__ import annotations

import re

import pytest

from services.data_server.arithmetic import HELD_OUT_SHARE, questions

TEMPLATE = "What is {a} {op} {b}? Answer with just the number."


def make(digits: list[int], operations: str, seed: int = 0) -> tuple[list[tuple[int, str, int, str]], ...]:
    sides = questions(digits=digits, operations=operations, template=TEMPLATE, seed=seed)
    parsed = []
    for side in sides:
        found = [(re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\? .*", q.question), q.answer) for q in side]
        parsed.append([(int(m[1]), m[2], int(m[3]), answer) for m, answer in found if m])
        assert len(parsed[-1]) == len(side)
    return tuple(parsed)


@pytest.mark.parametrize(("digits", "operations"), [([1], "+"), ([2], "+"), ([1, 2], "+-*")])
def test_answers_are_right_and_operands_have_their_digits(digits: list[int], operations: str) -> None:
    for a, op, b, answer in [q for side in make(digits, operations) for q in side]:
        assert str({"+": a + b, "-": a - b, "*": a * b}[op]) == answer
        assert len(str(a)) in digits
        assert len(str(b)) in digits
        assert not answer.startswith("-")


@pytest.mark.parametrize(("digits", "operations"), [([1], "+"), ([2], "*"), ([1, 2], "+-*")])
def test_no_held_out_question_is_a_training_question_turned_round(digits: list[int], operations: str) -> None:
    train, held_out = make(digits, operations)
    pairs = [{(op, *sorted((a, b))) for a, op, b, _ in side} for side in (train, held_out)]
    assert pairs[0].isdisjoint(pairs[1])
    assert len(pairs[1]) == pytest.approx(HELD_OUT_SHARE * len(pairs[0] | pairs[1]), rel=0.1)


def test_one_digit_sums_are_all_there() -> None:
    train, held_out = make([1], "+")
    assert sorted((a, b) for a, _, b, _ in train + held_out) == [(a, b) for a in range(10) for b in range(10)]


def test_the_seed_decides_the_split_and_nothing_else_does() -> None:
    assert make([2], "+", 1) == make([2], "+", 1)
    assert make([2], "+", 1) != make([2], "+", 2)
