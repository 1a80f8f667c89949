"""The queue of fresh groups: first in, first out, each group handed out once, by lease and acknowledgement.

``Admission`` bounds what will come into the queue: the prompts in flight of all collectors together, by what the
trainer can use in time. So the load on engines and services depends on the trainer and not on the number of collectors.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.http.problems import ProblemError
from services.protocol import replay as wire
from services.protocol.groups import Group
from services.replay_buffer.store import Record, Store

# Far more groups than a trainer may be behind; producers that are refused wait and try again.
QUEUE_CAPACITY = 65_536

_KEPT_EXPIRED_LEASES = 1000
_OF_SOURCE = " AND source = :source"


class FreshQueue:
    """A queue of groups that no trainer has seen yet, in the store's database."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._db = store.database

    def counts(self, source: str = "") -> tuple[int, int]:
        """Return the number of groups that wait and the number that leases hold, of one source or of all."""
        counts: tuple[int, int] = self._db.execute(
            "SELECT count(*) - count(lease), count(lease) FROM members INDEXED BY queued "
            f"WHERE place = 'queue'{_OF_SOURCE if source else ''}",
            {"source": source},
        ).fetchone()
        return counts

    def leases(self) -> tuple[int, float | None]:
        """Return the number of leases and the time at which the first of them expires (Unix seconds)."""
        leases: tuple[int, float | None] = self._db.execute(
            "SELECT count(*), min(expires_at) FROM leases WHERE NOT expired"
        ).fetchone()
        return leases

    def enqueue(self, groups: Sequence[Group], priorities: Sequence[float] | None) -> wire.AddGroupsReply:
        """Queue the groups whose id is not known yet.

        Raises:
            ProblemError: 429, the queue has too little room for them.
        """
        queued = sum(self.counts())
        if queued + len(groups) > QUEUE_CAPACITY:
            limit = f"{len(groups)} more exceed the queue's capacity of {QUEUE_CAPACITY}"
            detail = f"{queued} groups wait or are leased, and {limit}; wait until the trainer has taken some"
            raise ProblemError(429, detail, {"Retry-After": "1"})
        with self._store.transaction():
            added = self._store.insert_new(groups, priorities)
            self._db.executemany("INSERT INTO members VALUES (?, 'queue', 0, ?, ?, ?, NULL)", added)
        self._store.counts["enqueued"] += len(added)
        self._store.counts["duplicates"] += len(groups) - len(added)
        return wire.AddGroupsReply(added=len(added), duplicates=len(groups) - len(added), size=self.counts()[0])

    def lease(self, request: wire.LeaseRequest, *, take_fewer: bool) -> bytes | None:
        """Return a LeaseReply as framed bytes; None if fewer than ``min_groups`` wait, unless ``take_fewer``."""
        if request.starts:
            with self._store.transaction():
                self._db.execute(
                    "UPDATE leases SET expires_at = ? WHERE consumer = ? AND request_id IS NOT ? AND NOT expired",
                    (self._store.clock(), request.consumer, request.request_id),
                )
        self.expire_due()
        if request.request_id is not None:
            repeated = self._db.execute(
                "SELECT id, sequences FROM leases WHERE consumer = ? AND request_id = ? AND NOT expired",
                (request.consumer, request.request_id),
            ).fetchone()
            if repeated is not None:
                return self._reply(repeated[0], json.loads(repeated[1]), 0)
        fresh, stale = self._first(request.max_groups, request.min_policy_version, request.source)
        if len(fresh) < request.min_groups and not take_fewer:
            return None
        lease_id = uuid.uuid4().hex if fresh else None
        if fresh or stale:
            with self._store.transaction():
                self._store.delete(stale)
                if lease_id is not None:
                    expires_at = self._store.clock() + request.lease_seconds
                    self._db.execute(
                        "INSERT INTO leases VALUES (?, ?, ?, ?, ?, 0)",
                        (lease_id, request.consumer, request.request_id, json.dumps(fresh), expires_at),
                    )
                    leased = [(lease_id, sequence) for sequence in fresh]
                    self._db.executemany("UPDATE members SET lease = ? WHERE sequence = ?", leased)
            self._store.counts["dropped_stale"] += len(stale)
        return self._reply(lease_id, fresh, len(stale))

    def acknowledge(self, request: wire.AcknowledgeRequest) -> wire.AcknowledgeReply:
        """Take a lease's groups off the queue, into the store or for good.

        An acknowledgement after the lease has expired still counts for the groups that nobody else has leased since.
        """
        self.expire_due()
        lease = self._db.execute("SELECT sequences FROM leases WHERE id = ?", (request.lease_id,)).fetchone()
        if lease is None:
            return wire.AcknowledgeReply(acknowledged=0)
        sequences: list[int] = json.loads(lease[0])
        with self._store.transaction():
            self._db.execute("DELETE FROM leases WHERE id = ?", (request.lease_id,))
            # Groups of an expired lease wait again, or another lease holds them.
            rows = self._db.execute(
                "SELECT sequence, version, priority, source FROM json_each(?1) CROSS JOIN members ON sequence = value "
                "WHERE place = 'queue' AND ifnull(lease, ?2) = ?2 ORDER BY sequence",
                (lease[0], request.lease_id),
            )
            acknowledged = [Record(*row) for row in rows.fetchall()]
            if request.keep:
                self._store.keep(acknowledged)
            else:
                self._store.delete(record.sequence for record in acknowledged)
        self._store.counts["acknowledged"] += len(acknowledged)
        return wire.AcknowledgeReply(acknowledged=len(acknowledged), lost=len(sequences) - len(acknowledged))

    def expire_due(self) -> None:
        """Let the groups of leases that have run out wait again, at their old places."""
        due = self._db.execute(
            "SELECT id FROM leases WHERE NOT expired AND expires_at <= ?", (self._store.clock(),)
        ).fetchall()
        if not due:
            return
        with self._store.transaction():
            self._db.executemany("UPDATE members SET lease = NULL WHERE place = 'queue' AND lease = ?", due)
            self._db.executemany("UPDATE leases SET expired = 1 WHERE id = ?", due)
            self._db.execute(
                "DELETE FROM leases WHERE expired AND rowid NOT IN "
                "(SELECT rowid FROM leases WHERE expired ORDER BY rowid DESC LIMIT ?)",
                (_KEPT_EXPIRED_LEASES,),
            )
        self._store.counts["leases_expired"] += len(due)

    def _first(self, count: int, least_version: int, source: str) -> tuple[list[int], list[int]]:
        """Return the first ``count`` waiting groups of at least that policy version, and the older ones before them.

        With a ``source`` only its groups are among them.
        """
        fresh: list[int] = []
        stale: list[int] = []
        rows = self._db.execute(
            "SELECT sequence, version FROM members INDEXED BY queued "
            f"WHERE place = 'queue' AND lease IS NULL{_OF_SOURCE if source else ''} ORDER BY sequence",
            {"source": source},
        )
        for sequence, version in rows:
            if len(fresh) == count:
                break
            (fresh if version >= least_version else stale).append(sequence)
        rows.close()
        return fresh, stale

    def _reply(self, lease_id: str | None, sequences: Sequence[int], dropped: int) -> bytes:
        fields = {"lease_id": lease_id, "dropped_stale": dropped, "waiting": self.counts()[0]}
        return wire.framed(fields, self._db.groups(sequences))


SILENT_SECONDS = 15.0
"""A collector that has not asked again this long after its last request ended is taken for dead: others get its share.
A collector asks at least every five seconds."""

REJOIN_SECONDS = 10.0
"""After a restart, wait this long before admitting: by then each collector has reported its prompts in flight, because
the longest pause of a client that repeats a request is five seconds."""


@dataclass
class _Collector:
    """The prompts in flight of one collector, all of one source, which count until a time of the clock."""

    in_flight: int
    until: float
    source: str


@dataclass
class Asking:
    """A request that waits for places."""

    request: wire.AdmissionRequest
    places: int = 0
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


class Admission:
    """The prompts in flight of all collectors, in memory, and the requests for more. Used from the event loop only."""

    def __init__(self, *, is_restart: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._opens_at = clock() + (REJOIN_SECONDS if is_restart else 0.0)
        self._collectors: dict[str, _Collector] = {}
        self._asking: list[Asking] = []

    @property
    def awaited(self) -> set[str]:
        """The sources for which a request waits."""
        return {asking.request.source for asking in self._asking}

    def in_flight(self) -> dict[str, int]:
        """Return the prompts in flight by collector, without the collectors that fell silent."""
        now = self._clock()
        self._collectors = {name: collector for name, collector in self._collectors.items() if collector.until > now}
        return {name: collector.in_flight for name, collector in self._collectors.items()}

    def ask(self, request: wire.AdmissionRequest) -> Asking:
        """Note what a collector has in flight, and put its request behind the others; drop its earlier request."""
        until = self._clock() + request.wait_seconds + SILENT_SECONDS
        self._collectors[request.collector] = _Collector(request.in_flight, until, request.source)
        self._asking = [other for other in self._asking if other.request.collector != request.collector]
        self._asking.append(asking := Asking(request))
        return asking

    def withdraw(self, asking: Asking) -> None:
        """Let a request wait no longer."""
        if asking in self._asking:
            self._asking.remove(asking)

    def finish(self, collector: str, groups: int) -> None:
        """Note that a collector has queued the groups of some of its prompts."""
        if state := self._collectors.get(collector):
            state.in_flight = max(0, state.in_flight - groups)

    def admit(self, waiting: int, leased: int, source: str = "") -> None:
        """Give places to a source's requests, given the numbers of its groups that wait in the queue and on lease.

        The learner trains one batch a version and publishes one version a batch. So a group that is begun with fewer
        than MAX_STALENESS batches ahead of it is fresh enough when its turn comes, whatever the learner is doing (the
        bound of AReaL, arXiv:2505.24298, counted from the learner's side). With MAX_STALENESS 0, the next batch is
        begun when the last one has been trained on. No collector gets more than an equal share of the bound.

        All this is counted by source, so that the groups of one take no place of another's.
        """
        if self._clock() < self._opens_at:
            return
        in_flight = {name: count for name, count in self.in_flight().items() if self._collectors[name].source == source}
        ahead = waiting + sum(in_flight.values())
        for asking in [asking for asking in self._asking if asking.request.source == source]:
            request = asking.request
            batch, bound = request.batch_size, request.bound
            bound = batch * request.max_staleness if bound is None else bound
            free = max(bound - ahead, batch - leased - ahead)
            share = math.ceil(max(bound, batch) / max(1, len(in_flight)))
            places = min(free, request.most, share - in_flight.get(request.collector, 0))
            if places > 0:
                ahead += places
                self._collectors[request.collector].in_flight += places
                asking.places = places
                asking.admitted.set()
                self._asking.remove(asking)
