"""A calculator for models: exact arithmetic on fractions, bounded in length, digits and exponents."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

MAX_LENGTH = 200
MAX_BITS = 512
MAX_EXPONENT = 64
_PLACES = 6

_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**", ",": "", "$": "", "_": ""})  # noqa: RUF001


class CalculationError(ValueError):
    """An expression that cannot be calculated; the message says why, in words for the model."""


def calculate(expression: str) -> str:
    """Return the value of an expression as a decimal number, exact up to six places.

    Allowed are numbers, ``+ - * /``, parentheses and powers with small exponents.

    Raises:
        CalculationError: the expression has anything else, divides by zero, or is too large.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculationError(f"the expression has more than {MAX_LENGTH} characters")
    text = expression.translate(_SPELLINGS).replace("%", "/100").strip()
    try:
        tree = ast.parse(text, mode="eval")
        value = _value(tree.body)
    except ZeroDivisionError as error:
        raise CalculationError("division by zero") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, CalculationError):
            raise
        raise CalculationError(f"{expression!r} is no expression of numbers") from error
    return _shown(value)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATIONS:
            return _bounded(_OPERATIONS[type(op)](_value(left), _value(right)))
    raise CalculationError(f"only numbers, + - * /, powers and parentheses are allowed, not {ast.unparse(node)[:40]!r}")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise CalculationError(f"exponents are whole numbers up to {MAX_EXPONENT}")
    return _bounded(_bounded(base) ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise CalculationError("the number is too large")
    return value


def _shown(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    rounded = round(value * 10**_PLACES)
    sign = "-" if rounded < 0 else ""
    whole, part = divmod(abs(rounded), 10**_PLACES)
    return f"{sign}{whole}.{part:0{_PLACES}d}".rstrip("0").rstrip(".")
