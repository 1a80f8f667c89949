"""Single episodes of a client of environment-servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.clients.environment import EnvironmentClient, ServedEpisode
from services.protocol.evaluation import Action, StepResult


@asynccontextmanager
async def begun(client: EnvironmentClient, seed: int, split: str | None = None) -> AsyncIterator[ServedEpisode]:
    """An episode, which ends with the context."""
    episode = await client.begin(seed, split)
    try:
        yield episode
    finally:
        await client.end(episode)


async def step(client: EnvironmentClient, episode: ServedEpisode, action: Action) -> StepResult:
    """Take an action, and let the episode follow its result."""
    result = await client.step(episode, action)
    if result.is_taken:
        episode.follow(result)
    return result


def guess(messages: list[dict[str, Any]]) -> str:
    """Bisect the numbers from 1 to 100, beginning at a place that depends on the conversation alone."""
    low, high = 1, 100
    for number, answer in zip(messages[1::2], messages[2::2], strict=True):
        value = int(number["content"])
        low, high = (value + 1, high) if answer["content"] == "Higher." else (low, value - 1)
    return str((low + high) // 2)
