"""Plays an episode for each of many seeds, in this process."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple, Protocol

from services.clients.play import Arena, Decision, Episode, Step, play_at_once
from services.core.errors import ConfigurationError
from services.environment_server.catalogue import describe, open_with_trial
from services.environment_server.episodes import EpisodeTable
from services.environment_server.settings import EnvironmentSettings
from services.evaluation_head.policies import Policy, keep_fresh, make_policy
from services.evaluation_head.settings import HeadSettings
from services.http.problems import ProblemError
from services.protocol.evaluation import Action, EnvironmentInfo, StateKind, StepResult


class OpenArena(NamedTuple):
    """An arena, and the environment of its episodes."""

    info: EnvironmentInfo
    arena: Arena[Any]


class LocalArena:
    """The episodes of a table in this process; see Arena."""

    def __init__(self, table: EpisodeTable) -> None:
        self._table = table

    async def begin(self, seeds: Sequence[int]) -> list[Episode]:
        """See Arena."""
        return await asyncio.gather(*(self._begin(seed) for seed in seeds))

    async def _begin(self, seed: int) -> Episode:
        try:
            reply = await self._table.reset(1, seed)
        except ProblemError as error:
            return Episode.not_begun(seed, error.detail)
        return Episode.begun(reply.episodes[0], reply.environment)

    async def step(self, moves: Sequence[tuple[Episode, Action]]) -> list[StepResult]:
        """See Arena."""
        return await self._table.step([episode.step_with(action) for episode, action in moves])

    async def end(self, episodes: Sequence[Episode]) -> None:
        """See Arena."""
        await self._table.close([episode.id for episode in episodes if not episode.has_ended])


@asynccontextmanager
async def open_arena(environment: str | None) -> AsyncIterator[OpenArena]:
    """Yield an environment in this process.

    Raises:
        ConfigurationError: it cannot be made.
    """
    settings = EnvironmentSettings.load(environment=environment)
    async with AsyncExitStack() as stack:
        make, trial = await open_with_trial(settings, stack, "--environment")
        trial.close()
        info = describe(settings.environment, make, trial, settings.most_steps)
        table = EpisodeTable(info, make, settings.environment_step_seconds)
        stack.push_async_callback(table.end)
        yield OpenArena(info, LocalArena(table))


class Play(Protocol):
    """The policies that play, and the record of their episodes."""

    async def ask(self, episodes: Sequence[Any]) -> Sequence[Decision]:
        """Return a decision for each of some episodes; see services.clients.play."""

    def add(self, steps: Sequence[Step]) -> None:
        """Take one step of each of some episodes."""

    def end(self, episode: Any) -> None:
        """Take an episode that the environment has ended."""


async def play_seeds(place: OpenArena, seeds: Iterable[int], record: Play, *, at_once: int) -> dict[int, str]:
    """Play an episode for each seed; return why seeds have none that ended.

    Args:
        place: the arena.
        seeds: different seeds.
        record: the policies and the record.
        at_once: episodes that are played together; conversations are played each alone.
    """
    todo = deque(seeds)
    left_out: dict[int, str] = {}

    def next_seeds(room: int) -> Sequence[int]:
        return [todo.popleft() for _ in range(min(room, len(todo)))]

    async def settle(episode: Episode) -> None:
        if episode.has_ended:
            record.end(episode)
        else:
            left_out[episode.seed] = str(episode.detail)

    size = min(at_once, len(todo))
    sizes = [1] * size if place.info.state.kind is StateKind.MESSAGES else [size]
    await play_at_once(sizes, place.arena, next_seeds, record.ask, settle, record.add)
    return left_out


async def open_policies(
    stack: AsyncExitStack, text: str, info: EnvironmentInfo, at_once: int
) -> tuple[dict[str, Policy], dict[str, str]]:
    """Open the policies of ``--policies`` until ``stack`` closes; return them and their targets by name.

    Raises:
        ConfigurationError: a policy cannot be loaded, or does not fit the environment.
    """
    size = os.environ.get("HEAD_BATCH_SIZE") or at_once
    # All episodes ask at the same time, so that no batch waits for more states.
    settings = {"head_batch_size": size, "head_llm_concurrency": at_once, "head_timeout_ms": 0.0}
    head = HeadSettings.load(head_policies=text.replace(",", " "), **settings)
    if not head.policies:
        raise ConfigurationError("--policies is empty; name policies, as a=policies/cartpole,b=http://127.0.0.1:30000")
    policies = {
        name: await stack.enter_async_context(make_policy(name, target, head)) for name, target in head.policies.items()
    }
    if misfits := [why for policy in policies.values() if (why := policy.misfit(info))]:
        raise ConfigurationError("; ".join(misfits))
    for policy in policies.values():
        # A version in a directory stays the one that was loaded; those of models that others serve are followed.
        if "file" not in policy.stats():
            stack.callback(asyncio.create_task(keep_fresh(policy)).cancel)
    return policies, head.policies
