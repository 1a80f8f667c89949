"""The client of reward-server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.clients.base import ServiceClient
from services.core import endpoints
from services.core.errors import DependencyLostError
from services.protocol import (
    BatchRewardReply,
    BatchRewardRequest,
    RewardItem,
    RewardResult,
)

REWARDS_A_REQUEST = 1024
"""Bounds the size of a body, and how long one request holds up the others."""


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
