"""The priority index: the records to sample from, as arrays in memory, and the draw by priority."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Rows = np.ndarray[Any, np.dtype[np.void]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

_ROW = np.dtype([("position", np.int64), ("sequence", np.int64), ("version", np.int64), ("priority", np.float64)])
_LEAST_ROWS = 1024


@dataclass(frozen=True)
class Draw:
    """A drawn record: its priority, the probability of drawing it first, and its importance weight."""

    sequence: int
    priority: float
    probability: float
    weight: float


class PriorityIndex:
    """Records in order of arrival, one row each: position, sequence number, policy version, priority.

    ``position`` is the order of arrival and names a record. Records leave in this order, too. A draw depends on the
    records and the seed alone, not on how the index came to hold them, so that a restarted buffer draws the same.
    """

    def __init__(self, rows: Sequence[tuple[int, int, int, float]] = ()) -> None:
        """Fill the index with rows (position, sequence, version, priority), sorted by position."""
        self._rows = np.array(list(rows), _ROW)
        self._first, self._end = 0, len(rows)

    def __len__(self) -> int:
        """Return the number of records."""
        return self._end - self._first

    @property
    def _records(self) -> Rows:
        return self._rows[self._first : self._end]

    def add(self, sequence: int, version: int, priority: float) -> int:
        """Add a record at the end and return its position."""
        kept = self._records
        if self._end == len(self._rows):
            self._rows = np.zeros(max(_LEAST_ROWS, 2 * len(kept)), _ROW)
            self._rows[: len(kept)] = kept
            self._first, self._end = 0, len(kept)
        position = int(kept["position"][-1]) + 1 if len(kept) else 1
        self._rows[self._end] = (position, sequence, version, priority)
        self._end += 1
        return position

    def remove_oldest(self, count: int) -> list[int]:
        """Remove the ``count`` records that came first and return their sequence numbers."""
        sequences: list[int] = self._records["sequence"][:count].tolist()
        self._first += len(sequences)
        return sequences

    def set_priority(self, position: int, priority: float) -> None:
        """Change the priority of the record at ``position``."""
        self._records["priority"][self._row_of(position)] = priority

    def highest_priority(self) -> float:
        """Return the highest priority in the index, 1 in an empty one."""
        return float(self._records["priority"].max()) if len(self) else 1.0

    def newest_version(self) -> int | None:
        """Return the newest policy version in the index, None in an empty one."""
        return int(self._records["version"].max()) if len(self) else None

    def newest(self, count: int, *, least_version: int = 0, exclude: Iterable[int] = ()) -> list[Draw]:
        """Return the ``count`` records that came last, newest first; ``exclude`` are positions."""
        rows = self._records[np.flatnonzero(self._qualifying(least_version, exclude))[-count:][::-1]]
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
        powers = self._records["priority"] ** exponent * qualifying
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
        rows = self._records[list(drawn)]
        columns = (rows["sequence"], rows["priority"], probabilities, weights)
        return [Draw(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]

    def _qualifying(self, least_version: int, exclude: Iterable[int]) -> Mask:
        mask: Mask = self._records["version"] >= least_version
        mask[[self._row_of(position) for position in exclude]] = False
        return mask

    def _row_of(self, position: int) -> int:
        return int(np.searchsorted(self._records["position"], position))
