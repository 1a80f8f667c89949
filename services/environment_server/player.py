"""Plays episodes of this server and asks an evaluation head for the actions; waits while the head is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from services.clients.evaluation_head import EvaluationHeadClient
from services.clients.play import Decision, Episode, play_at_once
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.environment_server.episodes import EpisodeTable
from services.environment_server.settings import EnvironmentSettings
from services.http.client import RequestRefusedError
from services.http.problems import ProblemError
from services.protocol.evaluation import Action, StateKind, StepResult

log = get_logger(__name__)

REQUEST_SECONDS = 60.0
"""Limit of one request with its retries. After it the episodes are marked as in use and the request is sent again."""
PAUSE_SECONDS = 2.0
"""Pause after a failure, before the next try."""


class Player:
    """A player that keeps ENVIRONMENT_PUSH_EPISODES episodes of a table under way; also the arena of its play."""

    def __init__(self, settings: EnvironmentSettings, table: EpisodeTable) -> None:
        self._settings = settings
        self._table = table
        self._head = EvaluationHeadClient(
            str(settings.eval_head_endpoint),
            server=settings.environment_server_name,
            environment=settings.environment,
            token=settings.token,
            deadline=REQUEST_SECONDS,
        )
        self._begun = 0
        self._finished = 0
        self._lost = 0
        self._trouble: str | None = None

    def stats(self) -> dict[str, Any]:
        """Return counts, and as ``trouble`` why episodes do not continue at the moment."""
        counts = {"finished": self._finished, "lost": self._lost}
        return {"head": self._head.url, **counts, "trouble": self._trouble}

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[Player]:
        """Play until the context ends."""
        async with self._head, asyncio.TaskGroup() as group:
            task = group.create_task(self._play())
            yield self
            task.cancel()

    async def _play(self) -> None:
        count = self._settings.environment_push_episodes
        # Conversations take different times, so each is played alone. States of numbers share one request.
        sizes = [1] * count if self._table.info.state.kind is StateKind.MESSAGES else [count]
        await play_at_once(sizes, self, self._seeds, self._ask, self._settle)
        await self._ask([])

    def _seeds(self, room: int) -> Sequence[int]:
        total = self._settings.environment_push_total
        first, count = self._begun, room if total is None else min(room, total - self._begun)
        self._begun += count
        return [(first + i) % 2**31 for i in range(count)]

    async def begin(self, seeds: Sequence[int]) -> list[Episode]:
        """See Arena. Waits until the episodes can be begun."""
        while True:
            try:
                reply = await self._table.reset(len(seeds), seeds[0])
            except ProblemError as error:
                self._report(f"no episode can be begun: {error.detail}")
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                return [Episode.begun(start, reply.environment) for start in reply.episodes]

    async def step(self, moves: Sequence[tuple[Episode, Action]]) -> list[StepResult]:
        """See Arena."""
        return await self._table.step([episode.step_with(action) for episode, action in moves])

    async def end(self, episodes: Sequence[Episode]) -> None:
        """See Arena."""
        await self._table.close([episode.id for episode in episodes if not episode.has_ended])

    async def _ask(self, episodes: Sequence[Episode]) -> list[Decision]:
        """Return the head's decisions, after any number of attempts, and report the episodes that have ended."""
        while True:
            try:
                decisions = await self._head.ask(episodes)
            except (DependencyLostError, RequestRefusedError) as error:
                self._report(str(error))
                self._table.touch([episode.id for episode in episodes])
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                if decisions and self._trouble is not None:
                    log.info("the head gives actions again")
                    self._trouble = None
                return decisions

    async def _settle(self, episode: Episode) -> None:
        """Count an episode, and report it to the head if it has ended."""
        if episode.has_ended:
            self._finished += 1
            self._head.report(episode)
        else:
            # It is not played again, because the same action would be refused again.
            self._lost += 1
            self._report(f"an episode was given up: {episode.detail}")

    def _report(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.warning("episodes do not continue", trouble=trouble)
        self._trouble = trouble
