"""math-verify as we call it, in this process: what it decides, and that running out is never a verdict."""

from __future__ import annotations

import pytest

from services.reward_server import verifier
from services.reward_server.answers import judge

EQUAL = [
    (r"\frac{3}{4}", "0.75"),
    (r"\sqrt{16}", "4"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"2\frac{1}{2}", "2.5"),
    ("10^5", "100000"),
    ("(1, 2)", "(1,2)"),
    ("5!", "120"),
    ("Paris", "Paris"),
]
UNEQUAL = [("3x", "3"), (r"\frac{2}{7}", "0.3"), ("(1, 2)", "(2, 1)"), ("garbage $$ {", "5"), ("", "5")]
NEARLY_NUMBERS = {
    "<answer>3<answer>4</answer></answer>": ["3", "4", "34", "12"],
    "<answer><answer>3</answer> or 4</answer>": ["3", "4", "34"],
    "<answer>3 4</answer>": ["3", "4", "34", "12"],
    "3 + 4 = 7 <answer>I do not know</answer>": ["3", "4", "7"],
    "#### 1 3/2": ["1.5", "1", "6.5"],
    "#### 1 1/0": ["1", "0", "11", "1.5"],
    "#### 1 0/2": ["1", "5", "0.5"],
    "#### 1 100/200": ["1.5", "5.5", "1"],
    "#### 1 -1/2": ["1.5", "-1.5", "1", "-0.5"],
    r"\boxed{\frac123}": ["1.5", "23", "1", "3", "0.5"],
    "#### 1e999999": ["1", "6", "999999"],
    "#### 1e-999999": ["0", "1"],
    "#### 1e6e6": ["1", "6", "1000000"],
}


def test_expressions_are_compared_by_value() -> None:
    assert [pair for pair in EQUAL if not verifier.is_equal(*pair)] == []
    assert [pair for pair in UNEQUAL if verifier.is_equal(*pair)] == []


def test_what_is_nearly_a_spelling_of_a_number_is_rewarded_as_none() -> None:
    for answer, truths in NEARLY_NUMBERS.items():
        for truth in truths:
            judgement = judge(answer, truth)
            assert judgement.answer is not None
            assert judgement.is_right is not True
            assert not verifier.is_equal(judgement.answer, truth), (answer, truth)


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
@pytest.mark.parametrize("where", ["latex2sympy", "sympy_expr_eq"])
def test_running_out_is_raised_where_math_verify_would_call_it_unequal(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], where: str
) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise error

    import math_verify.grader
    import math_verify.parser

    module = math_verify.parser if where == "latex2sympy" else math_verify.grader
    monkeypatch.setattr(module, where, run_out)
    with pytest.raises(error):
        # A text of its own for each case, because math-verify keeps what it has parsed.
        verifier.is_equal(rf"\frac{{{17}}}{{{19}}}+{error.__name__[0]}{where[0]}", "0.25")


def test_other_errors_still_mean_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify.grader

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(math_verify.grader, "sympy_expr_eq", fail)
    assert verifier.is_equal(r"\frac{23}{29}", "0.25") is False
