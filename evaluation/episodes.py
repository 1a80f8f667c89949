"""Plays an episode for each of many seeds, and once more each that its environment or its server loses."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from evaluation.arenas import OpenArena
from services.clients.play import Decision, Episode, Step, play
from services.core.errors import ConfigurationError
from services.evaluation_head.policies import make_policy
from services.evaluation_head.policy import Policy
from services.evaluation_head.settings import HeadSettings
from services.protocol.evaluation import EnvironmentInfo, StateKind, StepStatus

TRIES = 3
"""An episode that its environment or server loses is played again from the beginning, this often in all."""


class Play(Protocol):
    """The policies that play, and the record of their episodes."""

    async def ask(self, episodes: Sequence[Any]) -> Sequence[Decision]:
        """Return a decision for each of some episodes; see services.clients.play."""

    def add(self, steps: Sequence[Step]) -> None:
        """Take one step of each of some episodes."""

    def end(self, episode: Any) -> None:
        """Take an episode that the environment has ended."""


async def play_seeds(
    place: OpenArena, seeds: Iterable[int], record: Play, *, at_once: int, workers: int = 1
) -> dict[int, str]:
    """Play an episode for each seed; return why seeds have none that ended.

    An episode that is lost is played again after all others and alone, since it may have taken others with it. One
    that is refused is not, since the same action would be refused again.

    Args:
        place: the arena.
        seeds: different seeds.
        record: the policies and the record.
        at_once: episodes that one worker plays together; conversations are played each alone.
        workers: workers that play at once, each at its own pace.
    """
    todo = deque(seeds)
    refused: dict[int, str] = {}
    lost: dict[int, str] = {}

    def next_seeds(room: int) -> Sequence[int]:
        return [todo.popleft() for _ in range(min(room, len(todo)))]

    async def settle(episode: Episode) -> None:
        if episode.has_ended:
            record.end(episode)
        else:
            (refused if episode.status is StepStatus.REFUSED else lost)[episode.seed] = str(episode.detail)

    is_text = place.info.state.kind is StateKind.MESSAGES
    workers = min(workers, len(todo))
    size = min(at_once, -(-len(todo) // max(workers, 1)))
    sizes = [1] * (size * workers) if is_text else [size] * workers
    for _ in range(TRIES):
        todo.extend(sorted(lost))
        lost.clear()
        try:
            async with asyncio.TaskGroup() as group:
                for size in sizes:
                    group.create_task(play(size, place.arena, next_seeds, record.ask, settle, record.add))
        except BaseExceptionGroup as errors:
            # All fail for the same reason, so the first error is enough.
            raise errors.exceptions[0] from None
        if not lost:
            break
        sizes = [1]
    return refused | lost


async def open_policies(
    stack: AsyncExitStack, text: str, info: EnvironmentInfo, at_once: int, **settings: Any
) -> tuple[dict[str, Policy], dict[str, str]]:
    """Open the policies of ``--policies`` until ``stack`` closes; return them and their targets by name.

    Raises:
        ConfigurationError: a policy cannot be loaded, or does not fit the environment.
    """
    settings["head_batch_size"] = os.environ.get("HEAD_BATCH_SIZE") or at_once
    head = HeadSettings.load(head_policies=text.replace(",", " "), head_llm_concurrency=at_once, **settings)
    if not head.policies:
        raise ConfigurationError("--policies is empty; name policies, as a=policies/cartpole,b=http://127.0.0.1:30000")
    policies = {
        name: await stack.enter_async_context(make_policy(name, target, head)) for name, target in head.policies.items()
    }
    if misfits := [why for policy in policies.values() if (why := policy.misfit(info))]:
        raise ConfigurationError("; ".join(misfits))
    return policies, head.policies
