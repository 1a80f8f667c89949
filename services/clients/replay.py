"""The client of replay-buffer."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from services.clients.base import ServiceClient
from services.core import endpoints
from services.protocol import (
    AcknowledgeReply,
    AcknowledgeRequest,
    AddGroupsReply,
    AddGroupsRequest,
    Group,
    LeaseReply,
    LeaseRequest,
    ReplayStats,
    SampledGroup,
    SampleGroupsReply,
    SampleGroupsRequest,
    SnapshotReply,
    SnapshotRequest,
    UpdatePrioritiesReply,
    UpdatePrioritiesRequest,
)

GROUPS_A_REQUEST = 32
"""Bounds the size of a body, and how long one request holds up the others."""


class ReplayClient(ServiceClient):
    """The replay-buffer: the store of groups, and the queue of fresh ones."""

    service = endpoints.Task.REPLAY_BUFFER
    port = endpoints.REPLAY_PORT

    async def add(self, groups: Sequence[Group], priorities: Sequence[float] | None = None) -> AddGroupsReply:
        """Stores groups; those whose id is known already are left as they are."""
        return await self._add("/groups", groups, priorities)

    async def enqueue(self, groups: Sequence[Group], priorities: Sequence[float] | None = None) -> AddGroupsReply:
        """Puts fresh groups into the queue; those whose id is known already are left as they are."""
        return await self._add("/queue", groups, priorities)

    async def _add(self, path: str, groups: Sequence[Group], priorities: Sequence[float] | None) -> AddGroupsReply:
        if priorities is not None and len(priorities) != len(groups):
            raise ValueError(f"{len(groups)} groups but {len(priorities)} priorities")
        added = duplicates = size = 0
        for start in range(0, max(len(groups), 1), GROUPS_A_REQUEST):
            part = slice(start, start + GROUPS_A_REQUEST)
            request = AddGroupsRequest.model_construct(
                groups=list(groups[part]), priorities=None if priorities is None else list(priorities[part])
            )
            reply = await self.http.post_json(path, request, AddGroupsReply)
            added, duplicates, size = added + reply.added, duplicates + reply.duplicates, reply.size
        return AddGroupsReply(added=added, duplicates=duplicates, size=size)

    async def sample(self, request: SampleGroupsRequest) -> list[SampledGroup]:
        """Groups drawn without replacement; fewer than asked for when fewer qualify."""
        return (await self.http.post_json("/groups/sample", request, SampleGroupsReply)).groups

    async def update_priorities(self, priorities: Mapping[str, float]) -> UpdatePrioritiesReply:
        """Sets the priorities of groups by id."""
        request = UpdatePrioritiesRequest(priorities=dict(priorities))
        return await self.http.post_json("/groups/priorities", request, UpdatePrioritiesReply)

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Takes fresh groups off the front of the queue until they are acknowledged, released, or the lease ends."""
        if request.request_id is None:
            # A repeated request gets the same lease, not a second one.
            request = request.model_copy(update={"request_id": uuid.uuid4().hex})
        wait = request.wait_seconds
        return await self.http.post_json(
            "/queue/lease",
            request,
            LeaseReply,
            attempt_seconds=self.http.timeout + wait,
            deadline=self.http.deadline + wait,
        )

    async def acknowledge(self, request: AcknowledgeRequest) -> AcknowledgeReply:
        """Says that a lease's groups were trained on."""
        return await self.http.post_json("/queue/acknowledge", request, AcknowledgeReply)

    async def save_snapshot(self, label: str) -> SnapshotReply:
        """Remembers store and queue as they are now under ``label``, replacing a snapshot of that label."""
        return await self.http.post_json("/snapshots", SnapshotRequest(label=label), SnapshotReply)

    async def restore_snapshot(self, label: str) -> SnapshotReply:
        """Takes store and queue back to exactly what they were; RequestRefusedError (404) for an unknown label."""
        return await self.http.post_json("/snapshots/restore", SnapshotRequest(label=label), SnapshotReply)

    async def drop_snapshot(self, label: str) -> SnapshotReply:
        """Forgets a snapshot; one that does not exist holds 0 groups."""
        response = await self.http.request("DELETE", f"/snapshots/{label}")
        return SnapshotReply.model_validate_json(response.content)

    async def stats(self) -> ReplayStats:
        """What the buffer holds."""
        return await self.http.get_json("/stats", ReplayStats)
