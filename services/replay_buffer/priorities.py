"""The priority index: the records to sample from, as arrays in memory, and the draw by priority."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.intp]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

_ROW = np.dtype(
    [
        ("position", np.int64),
        ("sequence", np.int64),
        ("version", np.int64),
        ("priority", np.float64),
        ("stored_at", np.float64),
    ]
)
# The priority of a removed record, whose row stays until there is no room for new ones.
_REMOVED = -1.0
_LEAST_ROWS = 1024


@dataclass(frozen=True)
class Draw:
    """A drawn record: its priority, the probability of drawing it first, and its importance weight."""

    sequence: int
    priority: float
    probability: float
    weight: float


class PriorityIndex:
    """Records in order of arrival, one row each: position, sequence number, policy version, priority, time (Unix s).

    ``position`` is the order of arrival and names a record. A draw depends on the records and the seed alone,
    not on how the index came to hold them, so that a restarted buffer draws the same.
    """

    def __init__(self, rows: Sequence[tuple[int, int, int, float, float]] = ()) -> None:
        """Fill the index with rows (position, sequence, version, priority, stored_at), sorted by position."""
        self._size = self._end = len(rows)
        self._rows = np.zeros(max(_LEAST_ROWS, 2 * self._size), _ROW)
        self._rows[: self._end] = np.array(list(rows), _ROW)

    def __len__(self) -> int:
        """Return the number of records."""
        return self._size

    def add(self, sequence: int, version: int, priority: float, stored_at: float) -> int:
        """Add a record at the end and return its position."""
        if self._end == len(self._rows):
            kept = self._rows[self._is_kept()]
            self._rows = np.zeros(max(_LEAST_ROWS, 2 * len(kept)), _ROW)
            self._rows[: len(kept)] = kept
            self._end = len(kept)
        position = int(self._rows["position"][self._end - 1]) + 1 if self._end else 1
        self._rows[self._end] = (position, sequence, version, priority, stored_at)
        self._end += 1
        self._size += 1
        return position

    def remove(self, indices: Indices) -> list[int]:
        """Remove the records in these rows and return their sequence numbers."""
        self._rows["priority"][indices] = _REMOVED
        self._size -= len(indices)
        sequences: list[int] = self._rows["sequence"][indices].tolist()
        return sequences

    def set_priority(self, position: int, priority: float) -> None:
        """Change the priority of the record at ``position``."""
        self._rows["priority"][self._row_of(position)] = priority

    def highest_priority(self) -> float:
        """Return the highest priority in the index, 1 in an empty one."""
        return float(self._rows["priority"][: self._end].max()) if self._size else 1.0

    def oldest(self, count: int) -> Indices:
        """Return the rows of the ``count`` records that came first."""
        return np.flatnonzero(self._is_kept())[:count]

    def with_version_below(self, version: int) -> Indices:
        """Return the rows of records of an older policy version."""
        return np.flatnonzero(self._is_kept() & (self._rows["version"][: self._end] < version))

    def stored_before(self, time: float) -> Indices:
        """Return the rows of records that came before ``time`` (Unix seconds)."""
        return np.flatnonzero(self._is_kept() & (self._rows["stored_at"][: self._end] < time))

    def newest(self, count: int, *, least_version: int = 0, exclude: Iterable[int] = ()) -> list[Draw]:
        """Return the ``count`` records that came last, newest first; ``exclude`` are positions."""
        rows = self._rows[np.flatnonzero(self._qualifying(least_version, exclude))[-count:][::-1]]
        return [Draw(int(row["sequence"]), float(row["priority"]), 1.0, 1.0) for row in rows]

    def draw(
        self,
        count: int,
        random: np.random.Generator,
        *,
        exponent: float,
        correction: float = 0.0,
        least_version: int = 0,
        exclude: Iterable[int] = (),
    ) -> list[Draw]:
        """Draw without replacement, each time with probabilities proportional to priority ** exponent.

        Schaul et al. 2016 (arXiv:1511.05952), equation 1 and section 3.4: P(i) = p_i^a / sum_k p_k^a, and
        w_i = (N P(i))^-b / max_j w_j over the batch, where N counts the records that qualify: all of at least
        ``least_version`` whose position is not in ``exclude``.

        Independent draws that skip records drawn before have the same distribution as draws without replacement.
        """
        qualifying = self._qualifying(least_version, exclude)
        powers = np.maximum(self._rows["priority"][: self._end], 0.0) ** exponent * qualifying
        drawn: dict[int, float] = {}
        total = 0.0
        while len(drawn) < count:
            sums = np.cumsum(powers)
            if not sums.any():
                break
            total = total or float(sums[-1])
            points = random.random(count - len(drawn)) * sums[-1]
            # Rounding can put a point at the very end of the sums.
            for row in np.minimum(np.searchsorted(sums, points, side="right"), len(sums) - 1).tolist():
                if powers[row] > 0:
                    drawn[row] = float(powers[row])
                    powers[row] = 0.0
        probabilities = np.fromiter(drawn.values(), np.float64) / total
        weights = (np.count_nonzero(qualifying) * probabilities) ** -correction
        weights /= weights.max(initial=0.0)
        rows = self._rows[list(drawn)]
        columns = (rows["sequence"], rows["priority"], probabilities, weights)
        return [Draw(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]

    def _qualifying(self, least_version: int, exclude: Iterable[int]) -> Mask:
        mask = self._is_kept() & (self._rows["version"][: self._end] >= least_version)
        mask[[self._row_of(position) for position in exclude]] = False
        return mask

    def _is_kept(self) -> Mask:
        kept: Mask = self._rows["priority"][: self._end] != _REMOVED
        return kept

    def _row_of(self, position: int) -> int:
        return int(np.searchsorted(self._rows["position"][: self._end], position))
