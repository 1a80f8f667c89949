"""The desk of the fresh queue: adds, leases, acknowledgements, and what happens to leases that run out."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import orjson

from services.http.problems import ProblemError
from services.protocol import AcknowledgeReply, AcknowledgeRequest, AddGroupsReply, Group, LeaseRequest
from services.replay_buffer.packing import unpack
from services.replay_buffer.queue import Lease, Waiting
from services.replay_buffer.state import Change, State
from services.replay_buffer.storage import Kind, Transaction
from services.replay_buffer.store import new_records

_KEPT_EXPIRED_LEASES = 1000


class FreshDesk:
    """Hands fresh groups out, each once."""

    def __init__(self, state: State) -> None:
        self._state = state

    def enqueue(self, groups: Sequence[Group], priorities: Sequence[float] | None) -> AddGroupsReply:
        """Queues the groups whose id is not known yet.

        Raises:
            ProblemError: 429, there is no room for them.
        """
        state = self._state
        room = state.settings.replay_queue_capacity - len(state.queue)
        if room < len(groups):
            raise ProblemError(
                429,
                f"{len(state.queue)} groups wait or are leased, and {len(groups)} more do not fit in; wait until the "
                f"trainer has taken some (REPLAY_QUEUE_CAPACITY is {state.settings.replay_queue_capacity})",
                headers={"Retry-After": "1"},
            )
        added = 0
        with state.change() as change:
            for record in new_records(state, groups, priorities):
                change.enqueue(change.create(Kind.GROUP, record))
                added += 1
            change.forget_oldest()
        state.counts["enqueued"] += added
        state.counts["duplicates"] += len(groups) - added
        return AddGroupsReply(added=added, duplicates=len(groups) - added, size=state.queue.waiting)

    def lease(self, request: LeaseRequest, *, take_fewer: bool) -> bytes | None:
        """The JSON of a LeaseReply; None where fewer than ``min_groups`` wait, unless ``take_fewer``."""
        state = self._state
        self.expire_due()
        if request.request_id is not None:
            known = state.queue.lease_of_request(request.consumer, request.request_id)
            if known is not None:
                return self._reply(known, 0)
        taken, stale = state.queue.first(request.max_groups, request.min_policy_version)
        if len(taken) < request.min_groups and not take_fewer:
            return None
        lease: Lease | None = None
        if taken or stale:
            with state.change() as change:
                for group in stale:
                    change.dequeue(group, shelve=False)
                if taken:
                    lease = self._open(change, taken, request)
            state.counts["dropped_stale"] += len(stale)
        return self._reply(lease, len(stale))

    def acknowledge(self, request: AcknowledgeRequest) -> AcknowledgeReply:
        """Takes a lease's groups off the queue, into the store or for good."""
        state = self._state
        self.expire_due()
        lease = state.queue.leases.get(request.lease_id)
        if lease is None:
            return AcknowledgeReply(acknowledged=0)
        held, lost = state.queue.held_by(lease)
        with state.change() as change:
            for group in held:
                change.dequeue(group, shelve=request.keep)
            state.queue.close(lease)
            change.lease_changed(lease)
        state.counts["acknowledged"] += len(held)
        return AcknowledgeReply(acknowledged=len(held), lost=lost)

    def expire_due(self) -> None:
        """Lets the groups of leases that ran out wait again."""
        state = self._state
        due = state.queue.due(state.clock())
        if not due:
            return
        with state.change() as change:
            for lease in due:
                state.queue.expire(lease)
                change.lease_changed(lease)
            expired = [lease for lease in state.queue.leases.values() if lease.expired]
            for lease in expired[: max(0, len(expired) - _KEPT_EXPIRED_LEASES)]:
                state.queue.close(lease)
                change.lease_changed(lease)
        state.counts["leases_expired"] += len(due)

    def _open(self, change: Change, groups: Sequence[Waiting], request: LeaseRequest) -> Lease:
        lease = Lease(
            id=uuid.uuid4().hex,
            consumer=request.consumer,
            request_id=request.request_id,
            sequences=[group.sequence for group in groups],
            expires_at=self._state.clock() + request.lease_seconds,
        )
        self._state.queue.open(lease)
        change.lease_changed(lease)
        return lease

    def _reply(self, lease: Lease | None, dropped: int) -> bytes:
        def read(txn: Transaction) -> bytes:
            contents = [txn.contents(sequence) for sequence in (lease.sequences if lease is not None else [])]
            reply = {
                "lease_id": None if lease is None else lease.id,
                "groups": [unpack(data) for data in contents if data is not None],
                "dropped_stale": dropped,
                "waiting": self._state.queue.waiting,
            }
            return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)

        return self._state.storage.read(read)
