"""Plays episodes of this server's own, asking an evaluation head for the actions; head restarts are waited out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import Counter

from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.environment_server.catalogue import Catalogue, UnknownEnvironmentError
from services.environment_server.environments import EnvironmentBrokenError
from services.environment_server.episodes import EpisodeTable, FullError, StuckError
from services.environment_server.settings import EnvironmentSettings
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.evaluation import (
    EpisodePosition,
    EvaluateReply,
    EvaluateRequest,
    FinishedEpisode,
    OngoingEpisode,
    StepItem,
    StepStatus,
)

log = get_logger(__name__)

FAILED = Counter("environment_push_failed", "Requests to the evaluation head that were to no avail.")

REQUEST_SECONDS = 60.0
"""For one request with its retries; then the episodes' idle times are renewed and it is sent again."""
REFUSED_PAUSE_SECONDS = 2.0


class Player:
    """Keeps ENVIRONMENT_PUSH_EPISODES episodes going."""

    def __init__(self, settings: EnvironmentSettings, table: EpisodeTable, instance_key: str) -> None:
        assert settings.eval_head_endpoint is not None
        self._settings = settings
        self._table = table
        self._instance_key = instance_key
        self._head = HttpClient(
            settings.eval_head_endpoint,
            token=settings.token,
            service="evaluation-head",
            timeout=REQUEST_SECONDS,
            deadline=REQUEST_SECONDS,
        )
        self._begun = 0
        self.finished = 0
        self.lost = 0
        self.trouble: str | None = None

    def stats(self) -> dict[str, Any]:
        """How the playing goes; ``trouble`` is why the head gives no actions at the moment."""
        return {
            "head": self._settings.eval_head_endpoint,
            "finished": self.finished,
            "lost": self.lost,
            "trouble": self.trouble,
        }

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[Player]:
        """Plays until the context ends."""
        count = self._settings.environment_push_episodes
        # Conversations take their own time each; of numbers, many states make one request.
        sizes = [1] * count if Catalogue.is_conversation(self._settings.environment) else [count]
        async with self._head:
            players = [asyncio.create_task(self._play(size)) for size in sizes]
            for player in players:
                player.add_done_callback(_log_failure)
            try:
                yield self
            finally:
                for player in players:
                    player.cancel()
                await asyncio.gather(*players, return_exceptions=True)

    async def _play(self, size: int) -> None:
        plays: list[OngoingEpisode] = []
        reports: list[FinishedEpisode] = []
        while True:
            plays += await self._begin(size - len(plays))
            if not plays and not reports:
                return
            reply = await self._ask(plays, reports)
            reports = []
            if plays:
                plays, reports = await self._advance(plays, reply)

    async def _begin(self, count: int) -> list[OngoingEpisode]:
        total = self._settings.environment_push_total
        count = count if total is None else min(count, total - self._begun)
        if count <= 0:
            return []
        seed = (self._settings.environment_push_seed + self._begun) % 2**31
        self._begun += count
        while True:
            try:
                _, starts = await self._table.reset(None, count, seed)
            except (FullError, StuckError, EnvironmentBrokenError, UnknownEnvironmentError) as error:
                self._tell(f"no episode can be begun: {error}")
                await asyncio.sleep(REFUSED_PAUSE_SECONDS)
            else:
                return [OngoingEpisode(start.episode, start.seed, start.state) for start in starts]

    async def _ask(self, plays: Sequence[OngoingEpisode], reports: list[FinishedEpisode]) -> EvaluateReply:
        """The head's actions, however long it takes to get them."""
        positions = [
            EpisodePosition.model_construct(episode=play.episode, step=play.steps, episode_return=play.episode_return)
            for play in plays
        ]
        request = EvaluateRequest.model_construct(
            policy=self._settings.environment_push_policy,
            server=self._settings.environment_server_name,
            instance_key=self._instance_key,
            environment=self._settings.environment,
            states=[play.state for play in plays],
            episodes=positions,
            finished=reports,
        )
        while True:
            try:
                reply = await self._head.call("POST", "/evaluate", EvaluateReply, request)
                if len(reply.actions) != len(plays):
                    raise DependencyLostError(f"the head gave {len(reply.actions)} actions for {len(plays)} states")
            except (DependencyLostError, RequestRefusedError) as error:
                FAILED.inc()
                self._tell(str(error))
                self._table.touch([play.episode for play in plays])
                await asyncio.sleep(REFUSED_PAUSE_SECONDS)
            else:
                if self.trouble is not None:
                    log.info("the head gives actions again")
                    self.trouble = None
                return reply

    async def _advance(
        self, plays: Sequence[OngoingEpisode], reply: EvaluateReply
    ) -> tuple[list[OngoingEpisode], list[FinishedEpisode]]:
        """Takes the actions; returns the episodes that go on, and reports of those that ended."""
        items = [
            StepItem.model_construct(episode=play.episode, step=play.steps, action=action)
            for play, action in zip(plays, reply.actions, strict=True)
        ]
        going: list[OngoingEpisode] = []
        reports: list[FinishedEpisode] = []
        for play, result in zip(plays, await self._table.step(items), strict=True):
            if result.status is StepStatus.RUNNING:
                assert result.state is not None
                going.append(OngoingEpisode(play.episode, play.seed, result.state, result.steps, result.episode_return))
            elif result.status in (StepStatus.TERMINATED, StepStatus.TRUNCATED):
                self.finished += 1
                reports.append(
                    FinishedEpisode(
                        episode=play.episode,
                        steps=result.steps,
                        episode_return=result.episode_return,
                        seed=play.seed,
                    )
                )
            else:
                # An action that does not fit would not fit the second time either.
                self.lost += 1
                self._table.close([play.episode])
                self._tell(f"an episode was given up: {result.detail}")
        return going, reports

    def _tell(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.warning("playing is held up", trouble=trouble)
        self.trouble = trouble


def _log_failure(player: asyncio.Task[None]) -> None:
    if not player.cancelled() and (error := player.exception()) is not None:
        log.error("a player ended", error=repr(error))
