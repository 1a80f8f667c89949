r"""Forms of a ground truth that the data-server writes and the reward-server reads.

Datasets and models alike write an answer in LaTeX's ``\boxed{}``. The ground truth of a question from reasoning-gym is
its whole entry as JSON, from which the generator's scoring restores the question. JSON has neither tuples nor sets nor
numbers as keys, and some generators compare such values with those of an answer, so an entry has them as objects of
one key: ``{"(tuple)": [1, 2]}``, ``{"(set)": [1]}``, ``{"(dict)": [[1, "a"]]}``.
"""

from __future__ import annotations

import json
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TOKENS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}\\]|[{}]")


def last_boxed(text: str) -> str | None:
    r"""Return the trimmed content of the last ``\boxed{}`` or ``\fbox{}`` whose braces balance, None without one."""
    return find_box(text)[1]


def find_box(text: str, *, allow_open: bool = False) -> tuple[int, str | None]:
    r"""Return the end and the trimmed content of the last ``\boxed{}`` or ``\fbox{}``; (0, None) without one.

    With ``allow_open``, a last box that is never closed has the rest of its first line with text.
    """
    opened: list[int | None] = []
    end, content = 0, None
    for token in _TOKENS.finditer(text):
        kind = token.group()
        if kind.startswith(("\\boxed", "\\fbox")):
            opened.append(token.end())
        elif kind == "{":
            opened.append(None)
        elif kind == "}" and opened:
            start = opened.pop()
            if start is not None:
                end, content = token.end(), text[start : token.start()].strip()
    last_open = max((start for start in opened if start is not None), default=0) if allow_open else 0
    if last_open > end and (rest := text[last_open:].lstrip().split("\n", 1)[0].rstrip("$. ")):
        end, content = text.find(rest, last_open) + len(rest), rest
    return end, content


REASONING_GYM = "reasoning_gym:"
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
        content = {key: _as_json(self.content[key]) for key in ("answer", "metadata", "question")}
        described = {"generator": self.generator, "parameters": _as_json(self.parameters)}
        return json.dumps({"answer": content.pop("answer"), **described, **content}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Entry:
        """Return the entry that ``to_json`` wrote; ValueError for another text."""
        try:
            record = json.loads(text)
            content = {key: _from_json(record[key]) for key in ("question", "answer", "metadata")}
            return cls(str(record["generator"]), dict(_from_json(record["parameters"])), content)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"the ground truth is not an entry of reasoning-gym: {text[:50]!r}; "
                f"set DATASET={REASONING_GYM}NAME, or another REWARD_FN"
            ) from error


def _as_json(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # also the text of an enumeration's member
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return float(value)
    if isinstance(value, list):
        return [_as_json(part) for part in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_as_json(part) for part in value]}
    if isinstance(value, set | frozenset):
        return {_SET: sorted((_as_json(part) for part in value), key=json.dumps)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not value.keys() & {_TUPLE, _SET, _DICT}:
            return {str(key): _as_json(part) for key, part in value.items()}
        return {_DICT: [[_as_json(key), _as_json(part)] for key, part in value.items()]}
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(part) for part in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_from_json(part) for part in value[_TUPLE])
    if _SET in value:
        return {_from_json(part) for part in value[_SET]}
    if _DICT in value:
        return {_from_json(key): _from_json(part) for key, part in value[_DICT]}
    return {key: _from_json(part) for key, part in value.items()}
