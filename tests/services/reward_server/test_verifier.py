"""math-verify as we call it, in this process: what it decides, and that running out is never a verdict."""

from __future__ import annotations

import pytest

from services.reward_server import verifier


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [
        (r"\frac{3}{4}", "0.75", True),
        (r"\sqrt{16}", "4", True),
        ("x^2+2x+1", "(x+1)^2", True),
        (r"2\frac{1}{2}", "2.5", True),
        ("10^5", "100000", True),
        ("(1, 2)", "(1,2)", True),
        ("5!", "120", True),
        ("Paris", "Paris", True),
        ("3x", "3", False),
        (r"\frac{2}{7}", "0.3", False),
        ("(1, 2)", "(2, 1)", False),
        ("garbage $$ {", "5", False),
        ("", "5", False),
    ],
)
def test_expressions_are_compared_by_value(answer: str, truth: str, equal: bool) -> None:
    assert verifier.is_equal(answer, truth) is equal


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
        verifier.is_equal(rf"\frac{{{17}}}{{{19}}}+{error.__name__[0]}", "0.25")


def test_other_errors_still_mean_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify.grader

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(math_verify.grader, "sympy_expr_eq", fail)
    assert verifier.is_equal(r"\frac{23}{29}", "0.25") is False
