"""DataClient, RewardClient and ReplayClient: what trainer, collectors and evaluation call.

Each is an async context manager over one HttpClient and raises what that raises: RequestRefusedError for a request
that the service refuses, DependencyLostError for a service that does not answer in time.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import ClassVar, Self

from services import endpoints
from services.errors import DependencyLostError
from services.http_client import HttpClient
from services.protocol import (
    AcknowledgeReply,
    AcknowledgeRequest,
    AddGroupsReply,
    AddGroupsRequest,
    BatchRewardReply,
    BatchRewardRequest,
    ComponentRecord,
    Cursor,
    CursorRequest,
    DataStats,
    Group,
    LeaseReply,
    LeaseRequest,
    PromptBatch,
    PromptsRequest,
    ReplayStats,
    RewardItem,
    RewardResult,
    SampledGroup,
    SampleGroupsReply,
    SampleGroupsRequest,
    SnapshotReply,
    SnapshotRequest,
    Split,
    SuccessRatesReply,
    SuccessRatesRequest,
    UpdatePrioritiesReply,
    UpdatePrioritiesRequest,
)

# How many go into one request: bounds the size of bodies, and how long one holds up the others.
GROUPS_A_REQUEST = 32
REWARDS_A_REQUEST = 1024


class ServiceClient:
    """What the three clients share: one HttpClient and its life."""

    service: ClassVar[endpoints.Task]
    port: ClassVar[int]

    def __init__(
        self,
        endpoint: endpoints.Endpoint | None = None,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        deadline: float = 90.0,
    ) -> None:
        """Makes a client of the service at ``endpoint``, by default the job group's.

        ``timeout`` is for one attempt and ``deadline`` for a call with all its attempts, both in seconds.
        """
        address = endpoint or endpoints.endpoint(self.service, self.port)
        self.http = HttpClient(address.url, token=token, timeout=timeout, service=self.service.value, deadline=deadline)

    async def __aenter__(self) -> Self:
        await self.http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.__aexit__(kind, error, trace)

    async def wait_healthy(self, deadline_seconds: float) -> None:
        """Returns when the service is healthy; DependencyLostError when it is not within ``deadline_seconds``."""
        await self.http.wait_healthy(deadline_seconds)

    async def settings(self) -> ComponentRecord:
        """Ask what the service runs with."""
        return await self.http.get_json("/settings", ComponentRecord)


class DataClient(ServiceClient):
    """The data-server: prompts with their ground truths."""

    service = endpoints.Task.DATA_SERVER
    port = endpoints.DATA_PORT

    async def prompts(
        self,
        batch_size: int,
        split: Split | str = Split.TRAIN,
        cursor: Cursor | None = None,
        consumer: str = "trainer",
        *,
        shard: tuple[int, int] = (0, 1),
    ) -> PromptBatch:
        """The next ``batch_size`` prompts and the cursor after them.

        With a ``cursor`` the answer depends on it alone (and on ``shard``: index and count); without one, the server
        moves its own cursor of ``consumer`` on.
        """
        if cursor is not None:
            request = PromptsRequest(
                batch_size=batch_size, split=Split(split), cursor=cursor, shard_index=shard[0], shard_count=shard[1]
            )
            return await self.http.post_json("/prompts", request, PromptBatch)
        params = {
            "batch_size": batch_size,
            "split": Split(split).value,
            "consumer": consumer,
            # A repeated request must not use up a second batch.
            "request_id": uuid.uuid4().hex,
            "shard_index": shard[0],
            "shard_count": shard[1],
        }
        return await self.http.get_json("/prompts", PromptBatch, params=params)

    async def cursor(self, consumer: str) -> Cursor:
        """Where the server's own cursor of ``consumer`` stands in the training split."""
        return await self.http.get_json("/cursor", Cursor, params={"consumer": consumer, "split": Split.TRAIN.value})

    async def set_cursor(self, consumer: str, cursor: Cursor) -> Cursor:
        """Sets where the server's own cursor of ``consumer`` stands in the training split."""
        request = CursorRequest(consumer=consumer, cursor=cursor)
        response = await self.http.request("PUT", "/cursor", payload=request)
        return Cursor.model_validate_json(response.content)

    async def record_success_rates(self, success_rates: Mapping[str, float]) -> SuccessRatesReply:
        """Tells the curriculum the share of right completions by prompt id."""
        request = SuccessRatesRequest(success_rates=dict(success_rates))
        return await self.http.post_json("/success_rates", request, SuccessRatesReply)

    async def stats(self) -> DataStats:
        """What the server holds."""
        return await self.http.get_json("/stats", DataStats)


class RewardClient(ServiceClient):
    """The reward-server: scores answers."""

    service = endpoints.Task.REWARD_SERVER
    port = endpoints.REWARD_PORT

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result an item, in order; ``reward`` is None where an answer could not be scored."""
        chunks = [items[i : i + REWARDS_A_REQUEST] for i in range(0, len(items), REWARDS_A_REQUEST)]
        scored = await asyncio.gather(*(self._score(list(chunk)) for chunk in chunks))
        return [result for results in scored for result in results]

    async def _score(self, items: list[RewardItem]) -> list[RewardResult]:
        reply = await self.http.post_json(
            "/batch_reward",
            BatchRewardRequest(items=items),
            BatchRewardReply,
            # Slow answers take their time on a busy machine; asking again would only double the work.
            attempt_seconds=self.http.deadline,
        )
        if len(reply.rewards) != len(items):
            raise DependencyLostError(f"{self.service.value} scored {len(reply.rewards)} of {len(items)} answers")
        return reply.rewards


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
