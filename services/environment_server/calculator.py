"""A calculator for models: exact arithmetic on fractions."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

MAX_LENGTH = 200
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "%": "**percent ", ",": "", "$": "", "_": ""})  # noqa: RUF001
"""Replacements of characters. A percent sign becomes a power, which binds tighter than the other operators."""


class CalculationError(ValueError):
    """An expression that cannot be calculated; the message says why, in words for the model."""


def calculate(expression: str) -> str:
    """Return the value of an expression as a decimal number with up to six places.

    Allowed are numbers, ``+ - * /``, parentheses, and ``%`` behind a number or a parenthesis, which divides it by 100.

    Raises:
        CalculationError: the expression has anything else, or divides by zero.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculationError(f"the expression has more than {MAX_LENGTH} characters")
    try:
        value = _value(ast.parse(expression.translate(_SPELLINGS).strip(), mode="eval").body)
        return str(value) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0").rstrip(".")
    except ZeroDivisionError as error:
        raise CalculationError("division by zero") from error
    except CalculationError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise CalculationError(f"{expression!r} cannot be calculated") from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(op=ast.Pow(), left=number, right=ast.Name(id="percent")):
            return _value(number) / 100
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
    raise CalculationError(f"only numbers, + - * / and parentheses are allowed, not {ast.unparse(node)[:40]!r}")
