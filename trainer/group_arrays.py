"""Training groups as arrays, which is how they travel from rank 0 to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trainer.algorithm.packing import TrainingGroup, TrainingSequence, Turn

Array = npt.NDArray[Any]
Header = list[dict[str, Any]]

PROMPT = "prompt_ids"
PER_TOKEN: dict[str, type[np.generic]] = {
    "completion_ids": np.int64,
    # The ranks must see rank 0's very numbers, because they decide alike what is worth computing.
    "behaviour_logprobs": np.float64,
    "advantages": np.float64,
    "loss_mask": np.bool_,
    "values": np.float64,
    "returns": np.float64,
}
"""The fields of a sequence with one entry a token; some are None."""


def to_arrays(groups: Sequence[TrainingGroup]) -> tuple[Header, list[Array]]:
    """Return the groups without their lists of numbers, for JSON, and the lists of each field joined to one array."""
    sequences = [sequence for group in groups for sequence in group.sequences]
    header = [_header(group) | {"sequences": [_header(s) for s in group.sequences]} for group in groups]
    arrays = [_joined([group.prompt_ids for group in groups], np.int64)]
    for name, dtype in PER_TOKEN.items():
        lists = (getattr(sequence, name) for sequence in sequences)
        arrays.append(_joined([entries for entries in lists if entries is not None], dtype))
    return header, arrays


def from_arrays(header: Header, arrays: Sequence[Array]) -> list[TrainingGroup]:
    """Return the groups of ``to_arrays``, equal to the bit."""
    prompts, *per_token = arrays
    take_prompt = _Reader(prompts)
    readers = {name: _Reader(array) for name, array in zip(PER_TOKEN, per_token, strict=True)}
    return [
        TrainingGroup(
            **group
            | {PROMPT: take_prompt(group[PROMPT]), "sequences": [_sequence(s, readers) for s in group["sequences"]]}
        )
        for group in header
    ]


def _header(item: TrainingGroup | TrainingSequence) -> dict[str, Any]:
    """Return a dataclass's fields, with lengths in place of lists of numbers."""
    found = {field.name: getattr(item, field.name) for field in fields(item)}
    lists = {PROMPT, *PER_TOKEN} & found.keys()
    return found | {name: None if found[name] is None else len(found[name]) for name in lists}


def _sequence(header: dict[str, Any], readers: dict[str, _Reader]) -> TrainingSequence:
    lists = {name: None if header[name] is None else reader(header[name]) for name, reader in readers.items()}
    turns = header["turns"]
    return TrainingSequence(**header | lists | {"turns": None if turns is None else [Turn(**turn) for turn in turns]})


def _joined(lists: Sequence[Sequence[Any]], dtype: type[np.generic]) -> Array:
    return np.fromiter(chain.from_iterable(lists), dtype, sum(map(len, lists)))


class _Reader:
    """Reads one part of an array after the other, as lists."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self._place = 0

    def __call__(self, count: int) -> list[Any]:
        start, self._place = self._place, self._place + count
        return cast("list[Any]", self._array[start : self._place].tolist())
