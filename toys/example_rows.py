"""Write the data sets of the demos, the same bytes each time: ``python -m toys.example_rows``."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parents[1] / "examples"
Row = Mapping[str, Any]


def form() -> list[Row]:
    """Return sums of two digits, whose answers have a form, such as <<7>>."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    rows = [{"prompt": f"What is {a} + {b}?", "completion": f"<<{a + b}>>", "answer": f"<<{a + b}>>"} for a, b in pairs]
    return _chosen(rows, 64)


def largest() -> list[Row]:
    """Return questions for the largest of three different digits."""
    threes = permutations(range(1, 10), 3)
    rows = [
        {"question": f"Which is the largest of {a}, {b}, {c}?", "answer": str(max(a, b, c)), "numbers": [a, b, c]}
        for a, b, c in threes
    ]
    return _chosen(rows, 120)


PAIR = {
    "a plus b": "a + b",
    "a minus b": "a - b",
    "b minus a": "b - a",
    "a times b": "a * b",
    "the larger of a and b": "max(a, b)",
    "the smaller of a and b": "min(a, b)",
}
"""Functions of one line, in words and in Python."""
WITH_NUMBER = {
    "a plus {n}": "a + {n}",
    "b plus {n}": "b + {n}",
    "a minus {n}": "a - {n}",
    "{n} minus b": "{n} - b",
    "{n} times a": "{n} * a",
    "{n} times b": "{n} * b",
    "a plus b plus {n}": "a + b + {n}",
    "a minus b plus {n}": "a - b + {n}",
    "b minus a minus {n}": "b - a - {n}",
    "a times b plus {n}": "a * b + {n}",
    "{n} times a plus b": "{n} * a + b",
    "{n} times a minus b": "{n} * a - b",
    "a plus {n} times b": "a + {n} * b",
    "a to the power of {n}": "a ** {n}",
    "the larger of a and {n}": "max(a, {n})",
    "the smaller of b and {n}": "min(b, {n})",
}
"""Functions of one line with a number."""


def functions() -> list[Row]:
    """Return questions for functions of one line, each with its solution and three hidden calls."""
    bodies = PAIR | {words.format(n=n): body.format(n=n) for words, body in WITH_NUMBER.items() for n in range(2, 8)}
    rows = [_function(words, body) for words, body in bodies.items()]
    return _chosen(rows, len(rows))


def _function(words: str, body: str) -> Row:
    calls = random.Random(words)
    inputs = [[calls.randrange(-9, 10), calls.randrange(-9, 10)] for _ in range(3)]
    tests = {"fn_name": "f", "inputs": inputs, "outputs": [eval(body, {"a": a, "b": b}) for a, b in inputs]}
    return {
        "question": f"Write a Python function f(a, b) that returns {words}.",
        "answer": f"```python\ndef f(a, b):\n    return {body}\n```",
        "tests": json.dumps(tests),
    }


def _chosen(rows: Sequence[Row], count: int) -> list[Row]:
    """Return some of the rows in a random order, always the same."""
    return random.Random(0).sample(rows, count)


FILES = {"form.jsonl": form, "largest.jsonl": largest, "functions.jsonl": functions}


def text(rows: Sequence[Row]) -> str:
    """Return a line of JSON for each row."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """Write all files."""
    for name, rows in FILES.items():
        (DIRECTORY / name).write_text(text(rows()))


if __name__ == "__main__":
    main()
