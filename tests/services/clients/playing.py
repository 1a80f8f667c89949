"""Single episodes of a client of environment-servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
