"""The steps of a shard's episodes, as columns of a Parquet file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evaluation.trajectories.plan import Shard
from services.protocol.evaluation import ActionKind, EnvironmentInfo, StateKind

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_SUMMARY = b"trajectories"
_COLUMNS = (
    *("attempt", "step", "seat", "action", "version", "logprob"),
    *("reward", "rewards", "terminated", "truncated", "final_state"),
)


class Rows:
    """The steps of one shard in the order in which they were taken; ``table`` sorts them by episode."""

    def __init__(self, info: EnvironmentInfo) -> None:
        self._info = info
        self._states: list[NDArray[np.float64] | list[Any]] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}

    def add(self, states: Sequence[Any], **columns: Sequence[Any]) -> None:
        """Add one step of each of some episodes; ``attempt`` tells episodes that are played again apart."""
        is_numbers = self._info.state.kind is StateKind.NUMBERS
        self._states.append(np.asarray(states, np.float64) if is_numbers else list(states))
        for name, values in columns.items():
            self._columns[name].extend(values)

    def table(self, shard: Shard, indices: Mapping[int, int], seed_of: Callable[[int], int]) -> pa.Table:
        """Return the steps of the attempts in ``indices``, which has the index of each attempt's episode."""
        attempts = np.asarray(self._columns["attempt"], np.int64)
        kept = np.flatnonzero(np.isin(attempts, list(indices)))
        index = np.asarray([indices[attempt] for attempt in attempts[kept]], np.int64)
        steps = np.asarray(self._columns["step"], np.int32)
        order = kept[np.lexsort((steps[kept], index))]
        index = np.sort(index)
        seats = np.asarray(self._columns["seat"], np.int8)[order]
        seeds = {i: seed_of(i) for i in indices.values()}
        columns = {
            "episode": pa.array(index - shard.start + shard.first_episode),
            "seed": pa.array([seeds[i] for i in index.tolist()], pa.int64()),
            "step": pa.array(steps[order]),
            "policy": pa.array(shard.lineup, pa.string()).take(pa.array(seats)),
            "version": self._taken("version", order, pa.int64()),
            "state": self._state_column(order),
            "action": self._taken("action", order, self._action_type()),
            "logprob": self._taken("logprob", order, pa.float64()),
            "reward": self._taken("reward", order, pa.float64()),
            "terminated": self._taken("terminated", order, pa.bool_()),
            "truncated": self._taken("truncated", order, pa.bool_()),
            "final_state": self._taken("final_state", order, self._state_type()),
        }
        if self._info.seats > 1:
            lineups = [list(shard.lineup)] * len(order)
            columns |= {"seat": pa.array(seats), "policies": pa.array(lineups, pa.list_(pa.string()))}
            columns |= {"rewards": self._taken("rewards", order, pa.list_(pa.float64()))}
        return pa.table(columns)

    def _taken(self, name: str, order: NDArray[np.intp], kind: pa.DataType) -> pa.Array:
        values = self._columns[name]
        return pa.array([values[i] for i in order.tolist()], kind)

    def _state_type(self) -> pa.DataType:
        return _nested(self._info.state.shape) if self._info.state.kind is StateKind.NUMBERS else _MESSAGES

    def _action_type(self) -> pa.DataType:
        kinds = {ActionKind.INDEX: pa.int64(), ActionKind.TEXT: pa.string()}
        return kinds.get(self._info.action.kind) or _nested(self._info.action.shape)

    def _state_column(self, order: NDArray[np.intp]) -> pa.Array:
        if self._info.state.kind is not StateKind.NUMBERS:
            states = [state for chunk in self._states for state in chunk]
            return pa.array([states[i] for i in order.tolist()], _MESSAGES)
        shape = self._info.state.shape
        numbers = np.concatenate([np.empty((0, *shape)), *self._states])[order]
        column = pa.array(numbers.reshape(-1))
        for depth in range(len(shape), 0, -1):
            lists = int(np.prod([len(order), *shape[: depth - 1]]))
            column = pa.ListArray.from_arrays(pa.array(np.arange(lists + 1, dtype=np.int32) * shape[depth - 1]), column)
        return column


def _nested(shape: Sequence[int]) -> pa.DataType:
    kind = pa.float64()
    for _ in shape:
        kind = pa.list_(kind)
    return kind


def write_shard(path: Path, table: pa.Table, summary: Mapping[str, Any]) -> None:
    """Write a shard under a hidden name and rename it into place, so that readers see a whole file or none."""
    partial = path.with_name(f".{path.name}.partial")
    metadata = {**(table.schema.metadata or {}), _SUMMARY: json.dumps(summary).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), partial, compression="zstd")
    partial.replace(path)


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary that ``write_shard`` wrote into the file's metadata.

    Raises:
        ValueError: the file is not a shard.
    """
    try:
        summary: dict[str, Any] = json.loads(pq.read_metadata(path).metadata[_SUMMARY])
    except (OSError, pa.ArrowInvalid, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no shard of trajectories: {error!r}") from error
    return summary
