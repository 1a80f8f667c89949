"""Snapshots: which records the buffer held under a label, so that a resumed run finds them exactly so again.

A snapshot names records by sequence and has what changes about them. Contents are not copied; those that a snapshot
names are kept on disk after the record is gone. Since sequences are never used again, two runs that went different
ways from one snapshot do not collide; a *lineage* says which sequences belong to the present one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

Sequences = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Lineage:
    """The sequences that led to a state: half-open intervals in ascending order."""

    intervals: tuple[tuple[int, int], ...] = ()

    def __contains__(self, sequence: int) -> bool:
        return any(start <= sequence < end for start, end in self.intervals)

    def until(self, start: int, end: int) -> Lineage:
        """This lineage, and then the sequences from ``start`` to ``end`` (exclusive)."""
        if start >= end:
            return self
        if self.intervals and self.intervals[-1][1] == start:
            return Lineage((*self.intervals[:-1], (self.intervals[-1][0], end)))
        return Lineage((*self.intervals, (start, end)))

    def divergence(self, other: Lineage) -> int:
        """The first sequence from which on the two may differ."""
        shared = 0
        for mine, others in zip(self.intervals, other.intervals, strict=False):
            if mine[0] != others[0]:
                break
            shared = min(mine[1], others[1])
            if mine[1] != others[1]:
                break
        return shared


@dataclass(frozen=True)
class Snapshot:
    """A state of the buffer. ``stores`` has one table a kind: columns sequence, slot, rank, priority, stored_at."""

    lineage: Lineage
    stores: dict[str, dict[str, list[Any]]]
    queue: list[int]
    newest_version: int | None
    random_state: str
    saved_at: float

    def to_json(self) -> dict[str, Any]:
        """As kept on disk."""
        return {
            "lineage": [list(interval) for interval in self.lineage.intervals],
            "stores": self.stores,
            "queue": self.queue,
            "newest_version": self.newest_version,
            "random_state": self.random_state,
            "saved_at": self.saved_at,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Snapshot:
        """The reverse of ``to_json``."""
        intervals = tuple((start, end) for start, end in data["lineage"])
        return cls(
            Lineage(intervals),
            data["stores"],
            data["queue"],
            data["newest_version"],
            data["random_state"],
            data["saved_at"],
        )

    @property
    def sequences(self) -> Sequences:
        """All records that it names, ascending."""
        named: list[int] = [*self.queue]
        for table in self.stores.values():
            named.extend(table["sequence"])
        return np.sort(np.array(named, np.int64))

    @property
    def groups(self) -> int:
        """How many groups it has, those of the queue included."""
        return len(self.stores["group"]["sequence"]) + len(self.queue)


class Kept:
    """Which records some snapshot names, so that their contents must stay."""

    def __init__(self, snapshots: Iterable[tuple[str, Snapshot]] = ()) -> None:
        self._named: dict[str, Sequences] = {}
        self._lineages: dict[str, Lineage] = {}
        for label, snapshot in snapshots:
            self.add(label, snapshot)

    @property
    def labels(self) -> list[str]:
        """The labels there are."""
        return sorted(self._named)

    def add(self, label: str, snapshot: Snapshot) -> None:
        """Takes up a snapshot."""
        self._named[label] = snapshot.sequences
        self._lineages[label] = snapshot.lineage

    def drop(self, label: str) -> None:
        """Forgets a snapshot."""
        self._named.pop(label, None)
        self._lineages.pop(label, None)

    def names(self, sequence: int, *, but: str | None = None) -> bool:
        """Whether a snapshot, other than ``but``, names the record."""
        for label, named in self._named.items():
            place = int(np.searchsorted(named, sequence))
            if label != but and place < len(named) and named[place] == sequence:
                return True
        return False

    def knows(self, sequence: int, *, but: str | None = None) -> bool:
        """Whether the record belongs to the lineage of a snapshot other than ``but``."""
        return any(sequence in lineage for label, lineage in self._lineages.items() if label != but)
