"""The client of reward-server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from services.core.endpoints import Task
from services.core.errors import DependencyLostError
from services.http.client import ServiceClient
from services.protocol import rewards as wire
from services.protocol.accuracy import is_judged

REWARDS_A_REQUEST = 1024
"""Bounds the time for which one request delays the others."""
CHARACTERS_A_REQUEST = 2**23
"""Bounds the size of a body."""


class RewardClient(ServiceClient):
    """The reward-server: rewards of answers."""

    task = Task.REWARD_SERVER
    _relative: list[str] | None = None

    async def stats(self, deadline: float | None = None) -> wire.RewardStats:
        """Return what the service says of its rewards and its judge."""
        return await self.call("GET", "/stats", wire.RewardStats, deadline=deadline)

    async def is_relative(self, source: str) -> bool:
        """Return whether a part of a source's reward compares the answers of a group; ask once."""
        if self._relative is None:
            self._relative = (await self.stats()).relative
        return source in self._relative

    async def score(
        self, items: Sequence[wire.RewardItem], *, tries: int = 1, pause_seconds: float = 0.0
    ) -> list[wire.RewardResult]:
        """Return one result an item, in order; ``reward`` is None where an answer could not be scored in all tries."""
        results = await self._score_once(items)
        for _ in range(tries - 1):
            unscored = [i for i, result in enumerate(results) if not is_judged(result)]
            if not unscored:
                break
            await asyncio.sleep(pause_seconds)
            for i, result in zip(unscored, await self._score_once([items[i] for i in unscored]), strict=True):
                results[i] = result
        return results

    async def score_group(
        self, items: Sequence[wire.RewardItem], own_rewards: Sequence[float] | None = None, *, tries: int = 1
    ) -> list[wire.RewardResult]:
        """Return the results of all answers to one prompt, in order, compared where REWARD_FN compares them.

        Another try sends all of them, because each counts in the others' rewards; verdicts are kept by the service.
        ``own_rewards`` are those of agents, which the relative parts are added to.
        """
        results = await self._score(list(items), is_group=True, own_rewards=own_rewards)
        for _ in range(tries - 1):
            if all(map(is_judged, results)):
                break
            again = await self._score(list(items), is_group=True, own_rewards=own_rewards)
            results = [old if is_judged(old) else new for old, new in zip(results, again, strict=True)]
        return results

    async def _score_once(self, items: Sequence[wire.RewardItem]) -> list[wire.RewardResult]:
        scored = await asyncio.gather(*(self._score(chunk) for chunk in _chunks(items)))
        return [result for results in scored for result in results]

    async def _score(self, items: list[wire.RewardItem], **group: Any) -> list[wire.RewardResult]:
        # One attempt may take the whole deadline: repeating a request whose answers are slow would double the work.
        request = wire.BatchRewardRequest.of(items, **group)
        reply = await self.call("POST", "/batch_reward", wire.BatchRewardReply, request, attempt_seconds=self.deadline)
        if len(reply.rewards) != len(items):
            raise DependencyLostError(f"{self.service} scored {len(reply.rewards)} of {len(items)} answers")
        return reply.rewards


def _chunks(items: Sequence[wire.RewardItem]) -> Iterator[list[wire.RewardItem]]:
    """Yield the items of each request, in order; a row counts once a request."""
    chunk: list[wire.RewardItem] = []
    rows: set[str] = set()
    size = 0
    for item in items:
        row = item.row or ""
        own = len(item.prompt) + len(item.response) + len(item.ground_truth)
        of_row = 0 if row in rows else len(row)
        if chunk and (len(chunk) == REWARDS_A_REQUEST or size + own + of_row > CHARACTERS_A_REQUEST):
            yield chunk
            chunk, rows, size, of_row = [], set(), 0, len(row)
        chunk.append(item)
        rows.add(row)
        size += own + of_row
    if chunk:
        yield chunk
