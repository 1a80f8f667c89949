"""The client of reward-server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.core.endpoints import Task
from services.core.errors import DependencyLostError
from services.http.client import ServiceClient
from services.protocol.rewards import BatchRewardReply, BatchRewardRequest, RewardItem, RewardResult, is_correct

REWARDS_A_REQUEST = 1024
"""Bounds the size of a body, and the time for which one request delays the others."""


class RewardClient(ServiceClient):
    """The reward-server: rewards of answers."""

    task = Task.REWARD_SERVER

    async def score(
        self, items: Sequence[RewardItem], *, tries: int = 1, pause_seconds: float = 0.0
    ) -> list[RewardResult]:
        """Return one result an item, in order; ``reward`` is None where an answer could not be scored in all tries."""
        results = await self._score_once(items)
        for _ in range(tries - 1):
            unscored = [i for i, result in enumerate(results) if is_correct(result) is None]
            if not unscored:
                break
            await asyncio.sleep(pause_seconds)
            for i, result in zip(unscored, await self._score_once([items[i] for i in unscored]), strict=True):
                results[i] = result
        return results

    async def _score_once(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        chunks = [items[i : i + REWARDS_A_REQUEST] for i in range(0, len(items), REWARDS_A_REQUEST)]
        scored = await asyncio.gather(*(self._score(list(chunk)) for chunk in chunks))
        return [result for results in scored for result in results]

    async def _score(self, items: list[RewardItem]) -> list[RewardResult]:
        # One attempt may take the whole deadline: repeating a request whose answers are slow would double the work.
        request = BatchRewardRequest.of(items)
        reply = await self.call("POST", "/batch_reward", BatchRewardReply, request, attempt_seconds=self.deadline)
        if len(reply.rewards) != len(items):
            raise DependencyLostError(f"{self.service} scored {len(reply.rewards)} of {len(items)} answers")
        return reply.rewards
