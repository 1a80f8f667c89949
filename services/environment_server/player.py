"""Plays episodes of this server and asks an evaluation head for the actions; waits while the head is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import PROCESS_COLLECTOR

from services.clients.evaluation_head import EvaluationHeadClient
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.environment_server.episodes import EpisodeTable
from services.environment_server.settings import EnvironmentSettings
from services.http.client import RequestRefusedError
from services.http.problems import ProblemError
from services.protocol.evaluation import (
    Action,
    FinishedEpisode,
    OngoingEpisode,
    StateKind,
    StepStatus,
    Usage,
)

log = get_logger(__name__)


class UsageMeter:
    """A meter of this process's use, read once a second or less often."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        """The use between the last two readings; None before them, and on systems without /proc."""
        self._last = self._read()

    def update(self) -> None:
        """Read the counters again."""
        last, self._last = self._last, self._read()
        if last is not None and self._last is not None and self._last[0] > last[0]:
            cores = (self._last[1] - last[1]) / (self._last[0] - last[0])
            self.usage = Usage(cores=max(0.0, cores), memory_bytes=self._last[2])

    @staticmethod
    def _read() -> tuple[float, float, int] | None:
        """Return the time, the seconds of processor time so far, and the bytes of memory."""
        values = {sample.name: sample.value for metric in PROCESS_COLLECTOR.collect() for sample in metric.samples}
        if "process_cpu_seconds_total" not in values:
            return None
        return time.monotonic(), values["process_cpu_seconds_total"], int(values["process_resident_memory_bytes"])


REQUEST_SECONDS = 60.0
"""Limit of one request with its retries. After it the episodes are marked as in use and the request is sent again."""
PAUSE_SECONDS = 2.0
"""Pause after a failure, before the next try."""


class Player:
    """Keeps ENVIRONMENT_PUSH_EPISODES episodes going."""

    def __init__(self, settings: EnvironmentSettings, table: EpisodeTable, meter: UsageMeter) -> None:
        self._settings = settings
        self._table = table
        self._meter = meter
        self._head = EvaluationHeadClient(
            str(settings.eval_head_endpoint),
            policy=settings.environment_push_policy,
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
        """Return counts, and in ``trouble`` why episodes do not go on at the moment."""
        return {
            "head": self._head.url,
            "finished": self._finished,
            "lost": self._lost,
            "trouble": self._trouble,
        }

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[Player]:
        """Play until the context ends."""
        count = self._settings.environment_push_episodes
        # Conversations take different times and go on alone. States of numbers share one request.
        sizes = [1] * count if self._table.info.state.kind is StateKind.MESSAGES else [count]
        async with self._head, asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._play(size)) for size in sizes]
            yield self
            for task in tasks:
                task.cancel()

    async def _play(self, size: int) -> None:
        episodes: list[OngoingEpisode] = []
        reports: list[FinishedEpisode] = []
        while True:
            episodes += await self._begin(size - len(episodes))
            if not episodes and not reports:
                return
            actions = await self._ask(episodes, reports)
            episodes, reports = await self._advance(episodes, actions)

    async def _begin(self, count: int) -> list[OngoingEpisode]:
        total = self._settings.environment_push_total
        count = count if total is None else min(count, total - self._begun)
        if count <= 0:
            return []
        seed = (self._settings.environment_push_seed + self._begun) % 2**31
        self._begun += count
        while True:
            try:
                reply = await self._table.reset(count, seed)
            except ProblemError as error:
                self._report(f"no episode can be begun: {error.detail}")
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                return [OngoingEpisode(start.episode, start.seed, start.state) for start in reply.episodes]

    async def _ask(self, episodes: Sequence[OngoingEpisode], reports: list[FinishedEpisode]) -> list[Action]:
        """Return the head's actions, however long it takes to get them."""
        states, positions = [episode.state for episode in episodes], [episode.position for episode in episodes]
        while True:
            try:
                reply = await self._head.act(states, episodes=positions, finished=reports, usage=self._meter.usage)
            except (DependencyLostError, RequestRefusedError) as error:
                self._report(str(error))
                self._table.touch([episode.episode for episode in episodes])
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                if self._trouble is not None:
                    log.info("the head gives actions again")
                    self._trouble = None
                return reply.actions

    async def _advance(
        self, episodes: Sequence[OngoingEpisode], actions: Sequence[Action]
    ) -> tuple[list[OngoingEpisode], list[FinishedEpisode]]:
        """Take the actions; return the episodes that go on, and reports of those that ended."""
        going: list[OngoingEpisode] = []
        reports: list[FinishedEpisode] = []
        steps = [episode.step_with(action) for episode, action in zip(episodes, actions, strict=True)]
        for episode, result in zip(episodes, await self._table.step(steps), strict=True):
            if result.status in (StepStatus.REFUSED, StepStatus.LOST):
                # An action that does not fit would not fit the second time either.
                self._lost += 1
                await self._table.close([episode.episode])
                self._report(f"an episode was given up: {result.detail}")
                continue
            episode.follow(result)
            if result.status is StepStatus.RUNNING:
                going.append(episode)
            else:
                self._finished += 1
                reports.append(episode.report)
        return going, reports

    def _report(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.warning("episodes do not go on", trouble=trouble)
        self._trouble = trouble
