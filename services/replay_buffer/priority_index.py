"""The index of records from which groups are drawn by priority."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Rows = np.ndarray[Any, np.dtype[np.void]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Numbers = np.ndarray[Any, np.dtype[np.float64]]

_INTEGERS = ("position", "sequence", "version", "source")
_ROW = np.dtype([*((name, np.int64) for name in _INTEGERS), ("priority", np.float64)])
_LEAST_ROWS = 1024


@dataclass(frozen=True)
class Draw:
    """A drawn record: its priority, the probability of drawing it first, and its importance weight."""

    sequence: int
    priority: float
    probability: float
    weight: float


class PriorityIndex:
    """Records in order of arrival, one row each: position, sequence number, policy version, source, priority.

    ``position`` is the order of arrival and names a record. Records leave in this order, too. A draw depends on the
    records and the seed alone, not on how the index came to hold them, so that a restarted buffer draws the same. A
    ``source`` is a number of the caller's; methods that take one regard the records of that source alone.
    """

    def __init__(self, rows: Sequence[tuple[int, int, int, int, float]] = ()) -> None:
        """Fill the index with rows (position, sequence, version, source, priority), sorted by position."""
        self._rows = np.array(list(rows), _ROW)
        self._first, self._end = 0, len(rows)

    def __len__(self) -> int:
        """Return the number of records."""
        return self._end - self._first

    @property
    def _records(self) -> Rows:
        return self._rows[self._first : self._end]

    def add(self, sequence: int, version: int, priority: float, source: int = 0) -> int:
        """Add a record at the end and return its position."""
        kept = self._records
        if self._end == len(self._rows):
            self._rows = np.zeros(max(_LEAST_ROWS, 2 * len(kept)), _ROW)
            self._rows[: len(kept)] = kept
            self._first, self._end = 0, len(kept)
        position = int(kept["position"][-1]) + 1 if len(kept) else 1
        self._rows[self._end] = (position, sequence, version, source, priority)
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

    def highest_priority(self, source: int = 0) -> float:
        """Return the highest priority of a source's records, 1 without any."""
        priorities = self._records["priority"][self._records["source"] == source]
        return float(priorities.max()) if len(priorities) else 1.0

    def newest_version(self) -> int | None:
        """Return the newest policy version in the index, None in an empty one."""
        return int(self._records["version"].max()) if len(self) else None

    def newest(
        self, count: int, *, least_version: int = 0, exclude: Iterable[int] = (), source: int | None = None
    ) -> list[Draw]:
        """Return the ``count`` records that came last, newest first; ``exclude`` are positions."""
        rows = self._records[np.flatnonzero(self._qualifying(least_version, exclude, source))[-count:][::-1]]
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
        source: int | None = None,
    ) -> list[Draw]:
        """Draw without replacement, with chances proportional to priority ** exponent (arXiv:1511.05952, eq. 1).

        The draw is systematic (Madow 1949): records are lined up in random order, each as long as the expected number
        of times that it is drawn, at most 1, and drawn where points at equal distances fall on them. So the chance of
        a record to be in the draw is exactly its length P, and ``probability`` is P / count. Its ``weight`` is
        (N P / count) ** -correction (section 3.4), divided by the expected value of that over the records that can be
        drawn, whose number is N. With ``correction`` 1 the weighted sum over a draw is therefore an unbiased estimate
        of ``count`` times the mean over these records, up to the cap of P at 1.

        Records qualify if they are at least of ``least_version``, their position is not in ``exclude``, and they are
        of ``source``, if one is given.
        """
        powers = self._records["priority"] ** exponent * self._qualifying(least_version, exclude, source)
        rows = random.permutation(np.flatnonzero(powers))
        count = min(count, len(rows))
        if not count:
            return []
        chances = _capped(powers[rows], count)
        points = random.random() + np.arange(count)
        # Rounding can put a point at the very end of the sums.
        places = np.minimum(np.searchsorted(np.cumsum(chances), points, side="right"), len(rows) - 1)
        factors = (len(rows) * chances / count) ** -correction
        factors /= (factors * chances).sum() / count
        drawn = self._records[rows[places]]
        columns = (drawn["sequence"], drawn["priority"], chances[places] / count, factors[places])
        return [Draw(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]

    def _qualifying(self, least_version: int, exclude: Iterable[int], source: int | None) -> Mask:
        mask: Mask = self._records["version"] >= least_version
        if source is not None:
            mask &= self._records["source"] == source
        mask[[self._row_of(position) for position in exclude]] = False
        return mask

    def _row_of(self, position: int) -> int:
        return int(np.searchsorted(self._records["position"], position))


def _capped(powers: Numbers, total: int) -> Numbers:
    """Return numbers proportional to ``powers`` that add up to ``total``, except that none is above 1."""
    chances: Numbers = powers * (total / powers.sum())
    while (chances > 1).any():
        full = chances >= 1
        rest = powers[~full]
        chances[full] = 1.0
        chances[~full] = rest * ((total - full.sum()) / rest.sum()) if len(rest) else 0.0
    return chances
