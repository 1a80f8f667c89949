"""The client of replay-buffer."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence

import httpx

from services.core.endpoints import Task
from services.core.errors import DependencyLostError
from services.http.client import Reply, ServiceClient
from services.protocol import replay as wire
from services.protocol.groups import Group, GroupFormatError, pack

ACCEPT = {"Accept": wire.GROUPS_TYPE}

GROUPS_A_REQUEST = 32
"""Bounds the time for which one request delays the others."""
TOKENS_A_REQUEST = 1 << 22
"""Bounds the size of a body of several groups: a token takes at most 32 bytes, half of what the buffer takes."""


class ReplayClient(ServiceClient):
    """The replay-buffer: the store of groups, and the queue of fresh groups."""

    task = Task.REPLAY_BUFFER

    async def add(self, groups: Sequence[Group]) -> wire.AddGroupsReply:
        """Store groups; a group whose id the buffer has already stays as it is."""
        return await self._add("/groups", groups)

    async def enqueue(self, groups: Sequence[Group], collector: str = "") -> wire.AddGroupsReply:
        """Append fresh groups to the queue; a group whose id the buffer has already stays as it is.

        Their prompts are no longer in flight at the ``collector`` of that name.
        """
        return await self._add("/queue", groups, collector=collector)

    async def _add(self, path: str, groups: Sequence[Group], **params: str) -> wire.AddGroupsReply:
        added = duplicates = size = 0
        for part in _parts(groups):
            request, headers = wire.framed({}, map(pack, groups[part])), {"Content-Type": wire.GROUPS_TYPE}
            reply = await self.call("POST", path, wire.AddGroupsReply, request, params=params, headers=headers)
            added, duplicates, size = added + reply.added, duplicates + reply.duplicates, reply.size
        return wire.AddGroupsReply(added=added, duplicates=duplicates, size=size)

    async def sample(self, request: wire.SampleGroupsRequest) -> list[wire.SampledGroup]:
        """Draw groups without replacement; return fewer than asked for when fewer qualify."""
        return (await self.call("POST", "/groups/sample", wire.SampleGroupsReply, request, headers=ACCEPT)).groups

    async def update_priorities(self, priorities: Mapping[str, float]) -> wire.UpdatePrioritiesReply:
        """Set the priorities of groups by id."""
        request = wire.UpdatePrioritiesRequest(priorities=dict(priorities))
        return await self.call("POST", "/groups/priorities", wire.UpdatePrioritiesReply, request)

    async def lease(self, request: wire.LeaseRequest) -> wire.LeaseReply:
        """Take fresh groups from the front of the queue, until they are acknowledged or the lease expires."""
        if request.request_id is None:
            # A repeated request gets the same lease, not a second one.
            request = request.model_copy(update={"request_id": uuid.uuid4().hex})
        return await self._wait_for("/queue/lease", wire.LeaseReply, request)

    async def acknowledge(self, request: wire.AcknowledgeRequest) -> wire.AcknowledgeReply:
        """Report that a lease's groups were trained on."""
        return await self.call("POST", "/queue/acknowledge", wire.AcknowledgeReply, request)

    async def admit(self, request: wire.AdmissionRequest) -> int:
        """Return how many more prompts a collector may take, after a wait for room; 0 if there was none."""
        return (await self._wait_for("/queue/admission", wire.AdmissionReply, request)).places

    async def _wait_for(
        self, path: str, kind: type[Reply], request: wire.LeaseRequest | wire.AdmissionRequest
    ) -> Reply:
        """Send a request that the server may hold for its ``wait_seconds``."""
        wait = request.wait_seconds
        return await self.call(
            "POST",
            path,
            kind,
            request,
            headers=ACCEPT,
            attempt_seconds=self.timeout + wait,
            deadline=self.deadline + wait,
        )

    async def save_snapshot(self, label: str, deadline: float | None = None) -> wire.SnapshotReply:
        """Save store and queue as they are now under ``label``; replace a snapshot of that label."""
        return await self.call(
            "POST", "/snapshots", wire.SnapshotReply, wire.SnapshotRequest(label=label), deadline=deadline
        )

    async def restore_snapshot(self, label: str) -> wire.SnapshotReply:
        """Restore store and queue exactly; RequestRefusedError (404) for an unknown label."""
        return await self.call("POST", "/snapshots/restore", wire.SnapshotReply, wire.SnapshotRequest(label=label))

    async def drop_snapshot(self, label: str, deadline: float | None = None) -> wire.SnapshotReply:
        """Delete a snapshot; a snapshot that does not exist holds 0 groups."""
        return await self.call("DELETE", f"/snapshots/{label}", wire.SnapshotReply, deadline=deadline)

    def read(self, response: httpx.Response, reply_model: type[Reply]) -> Reply:
        """Return a reply in its type, from JSON or from packed groups.

        Raises:
            ValidationError: it is something else.
            DependencyLostError: another version of this program packed the groups.
        """
        if response.headers.get("content-type") != wire.GROUPS_TYPE:
            return super().read(response, reply_model)
        try:
            return reply_model.model_validate(wire.unframed(response.content))
        except GroupFormatError as error:
            raise DependencyLostError(f"{self.service} answered {response.url} with {error}") from error

    async def stats(self) -> wire.ReplayStats:
        """Return the buffer's statistics."""
        return await self.call("GET", "/stats", wire.ReplayStats)


def _parts(groups: Sequence[Group]) -> Iterator[slice]:
    """Yield the parts of ``groups`` that requests of their own carry; one for no groups at all."""
    start = tokens = 0
    for end, group in enumerate(groups):
        size = len(group.prompt_ids) + sum(sequence.tokens for sequence in group.sequences)
        if end > start and (end - start == GROUPS_A_REQUEST or tokens + size > TOKENS_A_REQUEST):
            yield slice(start, end)
            start, tokens = end, 0
        tokens += size
    yield slice(start, len(groups))
