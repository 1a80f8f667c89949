"""The queue of fresh groups: first in, first out, each handed out once, by lease and acknowledgement.

This is the order and who holds what, in memory; the buffer keeps it on disk.
"""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Waiting:
    """A fresh group. Its ``sequence`` is its place in the order."""

    id: str
    sequence: int
    version: int
    priority: float


@dataclass
class Lease:
    """Groups that a consumer holds until it acknowledges them, or until ``expires_at`` (Unix seconds).

    An expired lease stays known: a late acknowledgement still counts for the groups that nobody else has taken.
    """

    id: str
    consumer: str
    request_id: str | None
    sequences: list[int]
    expires_at: float
    expired: bool = field(default=False)

    def to_json(self) -> dict[str, Any]:
        """As kept on disk."""
        return asdict(self)


class FreshQueue:
    """Which groups wait, in which order, and which are leased."""

    def __init__(self) -> None:
        self._groups: dict[int, Waiting] = {}
        self._holders: dict[int, str] = {}
        # May hold sequences that are leased or gone by now; they are passed over when they come up.
        self._order: list[int] = []
        self.leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        """How many groups wait or are leased."""
        return len(self._groups)

    @property
    def leased(self) -> int:
        """How many groups are leased."""
        return len(self._holders)

    @property
    def waiting(self) -> int:
        """How many groups wait for a consumer."""
        return len(self._groups) - len(self._holders)

    @property
    def groups(self) -> list[Waiting]:
        """All groups, leased ones included, in order."""
        return [self._groups[sequence] for sequence in sorted(self._groups)]

    def get(self, sequence: int) -> Waiting | None:
        """The group of that sequence."""
        return self._groups.get(sequence)

    def add(self, group: Waiting) -> None:
        """Puts a group into the queue, at its place in the order."""
        self._groups[group.sequence] = group
        heapq.heappush(self._order, group.sequence)

    def remove(self, sequence: int) -> None:
        """Takes a group out for good."""
        del self._groups[sequence]
        self._holders.pop(sequence, None)

    def first(self, count: int, least_version: int) -> tuple[list[Waiting], list[Waiting]]:
        """The first ``count`` waiting groups of at least that policy version, and the older ones before them.

        Changes nothing that can be seen from outside.
        """
        taken: list[Waiting] = []
        stale: list[Waiting] = []
        previous = -1
        while self._order and len(taken) < count:
            sequence = heapq.heappop(self._order)
            group = self._groups.get(sequence)
            if group is None or sequence in self._holders or sequence == previous:
                continue
            previous = sequence
            (taken if group.version >= least_version else stale).append(group)
        for group in taken + stale:
            heapq.heappush(self._order, group.sequence)
        return taken, stale

    def open(self, lease: Lease) -> None:
        """Begins a lease of groups that wait."""
        self.leases[lease.id] = lease
        for sequence in lease.sequences:
            self._holders[sequence] = lease.id

    def close(self, lease: Lease) -> None:
        """Ends a lease; groups that it still holds wait again, at their old places."""
        self.expire(lease)
        del self.leases[lease.id]

    def expire(self, lease: Lease) -> None:
        """Lets the groups of a lease wait again, but keeps the lease known."""
        lease.expired = True
        for sequence in lease.sequences:
            if self._holders.get(sequence) == lease.id:
                del self._holders[sequence]
                heapq.heappush(self._order, sequence)

    def restored(self, lease: Lease) -> None:
        """Takes up a lease that was read from disk."""
        self.leases[lease.id] = lease
        if not lease.expired:
            for sequence in lease.sequences:
                if sequence in self._groups:
                    self._holders[sequence] = lease.id

    def held_by(self, lease: Lease) -> tuple[list[Waiting], int]:
        """The lease's groups that it holds or that nobody holds since it expired, and how many are lost to others."""
        held = [
            self._groups[sequence]
            for sequence in lease.sequences
            if sequence in self._groups and self._holders.get(sequence) in (None, lease.id)
        ]
        return held, len(lease.sequences) - len(held)

    def due(self, now: float) -> list[Lease]:
        """Leases that have expired by ``now`` but still hold their groups."""
        return [lease for lease in self.leases.values() if not lease.expired and lease.expires_at <= now]

    def next_expiry(self) -> float | None:
        """When the next lease expires (Unix seconds)."""
        return min((lease.expires_at for lease in self.leases.values() if not lease.expired), default=None)

    def lease_of_request(self, consumer: str, request_id: str) -> Lease | None:
        """The lease that a request was given before."""
        return next(
            (
                x
                for x in self.leases.values()
                if x.request_id == request_id and x.consumer == consumer and not x.expired
            ),
            None,
        )
