"""Entries of reasoning-gym as ground truths: JSON from which the generator's own scoring gets back what it made.

JSON has neither tuples nor sets nor numbers as keys, and some generators compare them with what they read from an
answer. They are written as objects of one key: ``{"(tuple)": [1, 2]}``, ``{"(set)": [1]}``, ``{"(dict)": [[1, "a"]]}``.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "reasoning_gym:"
"""The beginning of a DATASET of reasoning-gym, before the names of its generators."""

_TUPLE, _SET, _DICT = "(tuple)", "(set)", "(dict)"


@dataclass(frozen=True)
class Entry:
    """A question of a generator, with everything that scores an answer to it."""

    generator: str
    parameters: dict[str, Any]
    """Parameters of the generator that differ from its defaults; some scorings read them."""
    content: dict[str, Any]
    """The entry as the generator made it: question, answer and metadata."""

    def to_json(self) -> str:
        """Return the entry as text that is the same for the same entry.

        Raises:
            TypeError: the entry holds a value that JSON cannot express.
        """
        content = {key: _plain(self.content[key]) for key in ("answer", "metadata", "question")}
        described = {"generator": self.generator, "parameters": _plain(self.parameters)}
        return json.dumps({"answer": content.pop("answer"), **described, **content}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Entry:
        """Return the entry of ``to_json``; ValueError where the text is none."""
        try:
            found = json.loads(text)
            content = {key: _restored(found[key]) for key in ("question", "answer", "metadata")}
            return cls(str(found["generator"]), dict(_restored(found["parameters"])), content)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"the ground truth is no entry of reasoning-gym: {text[:50]!r}; set DATASET={PREFIX}NAME, or another "
                f"REWARD_FN"
            ) from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # Of an enumeration's member, too, the text that it is.
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return float(value)
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(part) for part in value]}
    if isinstance(value, set | frozenset):
        return {_SET: sorted((_plain(part) for part in value), key=json.dumps)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not value.keys() & {_TUPLE, _SET, _DICT}:
            return {str(key): _plain(part) for key, part in value.items()}
        return {_DICT: [[_plain(key), _plain(part)] for key, part in value.items()]}
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(part) for part in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_restored(part) for part in value[_TUPLE])
    if _SET in value:
        return {_restored(part) for part in value[_SET]}
    if _DICT in value:
        return {_restored(key): _restored(part) for key, part in value[_DICT]}
    return {key: _restored(part) for key, part in value.items()}
