"""The queue of fresh groups: first in, first out, each group handed out once, by lease and acknowledgement."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence

import orjson

from services.http.problems import ProblemError
from services.protocol.groups import Group
from services.protocol.replay import AcknowledgeReply, AcknowledgeRequest, AddGroupsReply, LeaseRequest
from services.replay_buffer.store import Record, Store

# Far more groups than a trainer may be behind; producers that are refused wait and try again.
QUEUE_CAPACITY = 65_536

_KEPT_EXPIRED_LEASES = 1000


class FreshQueue:
    """A queue of groups that no trainer has seen yet, in the store's database."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._db = store.database

    def counts(self) -> tuple[int, int]:
        """Return the number of groups that wait and the number that leases hold."""
        counts: tuple[int, int] = self._db.execute(
            "SELECT count(*) - count(lease), count(lease) FROM members INDEXED BY queued "
            "WHERE snapshot = 0 AND place = 'queue'"
        ).fetchone()
        return counts

    def leases(self) -> tuple[int, float | None]:
        """Return the number of leases and the time at which the first of them expires (Unix seconds)."""
        leases: tuple[int, float | None] = self._db.execute(
            "SELECT count(*), min(expires_at) FROM leases WHERE NOT expired"
        ).fetchone()
        return leases

    def enqueue(self, groups: Sequence[Group], priorities: Sequence[float] | None) -> AddGroupsReply:
        """Queue the groups whose id is not known yet.

        Raises:
            ProblemError: 429, there is no room for them.
        """
        queued = sum(self.counts())
        if queued + len(groups) > QUEUE_CAPACITY:
            raise ProblemError(
                429,
                f"{queued} groups wait or are leased, and {len(groups)} more exceed the queue's capacity of "
                f"{QUEUE_CAPACITY}; wait until the trainer has taken some",
                headers={"Retry-After": "1"},
            )
        with self._store.transaction():
            added = self._store.insert_new(groups, priorities)
            self._db.executemany(
                "INSERT INTO members (snapshot, sequence, place, position, version, priority, stored_at) "
                "VALUES (0, ?, 'queue', 0, ?, ?, 0)",
                [(record.sequence, record.version, record.priority) for record in added],
            )
        self._store.counts["enqueued"] += len(added)
        self._store.counts["duplicates"] += len(groups) - len(added)
        return AddGroupsReply(added=len(added), duplicates=len(groups) - len(added), size=self.counts()[0])

    def lease(self, request: LeaseRequest, *, take_fewer: bool) -> bytes | None:
        """Return the JSON of a LeaseReply; None if fewer than ``min_groups`` wait, unless ``take_fewer``."""
        self.expire_due()
        if request.request_id is not None:
            known = self._db.execute(
                "SELECT id, sequences FROM leases WHERE consumer = ? AND request_id = ? AND NOT expired",
                (request.consumer, request.request_id),
            ).fetchone()
            if known is not None:
                return self._reply(known[0], json.loads(known[1]), 0)
        taken, stale = self._first(request.max_groups, request.min_policy_version)
        if len(taken) < request.min_groups and not take_fewer:
            return None
        lease_id = uuid.uuid4().hex if taken else None
        if taken or stale:
            with self._store.transaction():
                self._store.delete(stale)
                if lease_id is not None:
                    expires_at = self._store.clock() + request.lease_seconds
                    self._db.execute(
                        "INSERT INTO leases VALUES (?, ?, ?, ?, ?, 0)",
                        (lease_id, request.consumer, request.request_id, json.dumps(taken), expires_at),
                    )
                    self._db.executemany(
                        "UPDATE members SET lease = ? WHERE snapshot = 0 AND sequence = ?",
                        [(lease_id, sequence) for sequence in taken],
                    )
            self._store.counts["dropped_stale"] += len(stale)
        return self._reply(lease_id, taken, len(stale))

    def acknowledge(self, request: AcknowledgeRequest) -> AcknowledgeReply:
        """Take a lease's groups off the queue, into the store or for good.

        An acknowledgement after the lease has expired still counts for the groups that nobody else has leased since.
        """
        self.expire_due()
        found = self._db.execute("SELECT sequences FROM leases WHERE id = ?", (request.lease_id,)).fetchone()
        if found is None:
            return AcknowledgeReply(acknowledged=0)
        sequences: list[int] = json.loads(found[0])
        with self._store.transaction():
            self._db.execute("DELETE FROM leases WHERE id = ?", (request.lease_id,))
            # Groups of an expired lease wait again, or another lease holds them.
            rows = self._db.execute(
                "SELECT sequence, version, priority FROM json_each(?1) CROSS JOIN members ON sequence = value "
                "WHERE snapshot = 0 AND place = 'queue' AND ifnull(lease, ?2) = ?2 ORDER BY sequence",
                (found[0], request.lease_id),
            )
            held = [Record(*row) for row in rows.fetchall()]
            if request.keep:
                self._store.keep(held)
            else:
                self._store.delete(record.sequence for record in held)
        self._store.counts["acknowledged"] += len(held)
        return AcknowledgeReply(acknowledged=len(held), lost=len(sequences) - len(held))

    def expire_due(self) -> None:
        """Let the groups of leases that have run out wait again, at their old places."""
        due = self._db.execute(
            "SELECT id FROM leases WHERE NOT expired AND expires_at <= ?", (self._store.clock(),)
        ).fetchall()
        if not due:
            return
        with self._store.transaction():
            self._db.executemany(
                "UPDATE members SET lease = NULL WHERE snapshot = 0 AND place = 'queue' AND lease = ?", due
            )
            self._db.executemany("UPDATE leases SET expired = 1 WHERE id = ?", due)
            self._db.execute(
                "DELETE FROM leases WHERE expired AND rowid NOT IN "
                "(SELECT rowid FROM leases WHERE expired ORDER BY rowid DESC LIMIT ?)",
                (_KEPT_EXPIRED_LEASES,),
            )
        self._store.counts["leases_expired"] += len(due)

    def _first(self, count: int, least_version: int) -> tuple[list[int], list[int]]:
        """Return the first ``count`` waiting groups of at least that policy version, and the older ones before them."""
        taken: list[int] = []
        stale: list[int] = []
        rows = self._db.execute(
            "SELECT sequence, version FROM members INDEXED BY queued "
            "WHERE snapshot = 0 AND place = 'queue' AND lease IS NULL ORDER BY sequence"
        )
        for sequence, version in rows:
            if len(taken) == count:
                break
            (taken if version >= least_version else stale).append(sequence)
        rows.close()
        return taken, stale

    def _reply(self, lease_id: str | None, sequences: Sequence[int], dropped: int) -> bytes:
        reply = {
            "lease_id": lease_id,
            "groups": self._db.groups(sequences),
            "dropped_stale": dropped,
            "waiting": self.counts()[0],
        }
        return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)
