"""The environment server's routes, and the player of a server that asks an evaluation head for its actions."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI

from services.clients.evaluation_head import EvaluationHeadClient
from services.clients.play import Decision, Episode, play_at_once
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.environment_server.catalogue import Environment, MakeEnvironment, describe, open_with_trial
from services.environment_server.environments import Tasks
from services.environment_server.episodes import MAX_STUCK, EpisodeTable, Hosted
from services.environment_server.openenv_server import add_openenv_routes
from services.environment_server.settings import EnvironmentSettings
from services.http.app import create_service_app
from services.http.client import RequestRefusedError
from services.http.problems import ProblemError, unknown_source
from services.protocol import evaluation as wire
from services.protocol.base import Health

log = get_logger(__name__)

SERVICE = "environment-server"
SWEEP_SECONDS = 1.0
IDLE_SECONDS = 300.0
"""An episode that was not stepped for this time is dropped: its client is gone. A head's restart takes less."""
KEPT_REPLIES = 1000
REQUEST_SECONDS = 60.0
"""Limit of one request with its retries. After it the episodes are marked as in use and the request is sent again."""
PAUSE_SECONDS = 2.0
"""Pause after a failure, before the next try."""


class Server:
    """The state behind the routes. ``table`` exists while the server runs."""

    table: EpisodeTable
    hosted: dict[str, Hosted]
    """The environments by the source that plays them; "" has the first, which OpenEnv's clients and a head play."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.settings = settings
        self.player: Player | None = None
        self._replies: OrderedDict[str, asyncio.Future[wire.ResetReply]] = OrderedDict()

    @asynccontextmanager
    async def running(self, _app: FastAPI) -> AsyncIterator[None]:
        """Hold episodes, and play some where EVAL_HEAD_ENDPOINT is set, until the context ends.

        Raises:
            ConfigurationError: ENVIRONMENT cannot be made, or an evaluation head cannot play it.
        """
        settings = self.settings
        async with AsyncExitStack() as stack:
            opened = {name: await self._open(name, stack) for name in dict.fromkeys(settings.environments.values())}
            self.hosted = {source: opened[name][:2] for source, name in settings.environments.items()}
            make, info, _ = next(iter(opened.values()))
            self.hosted[""] = make, info
            if settings.eval_head_endpoint is not None and (len(opened) > 1 or info.seats > 1):
                raise ConfigurationError(
                    f"EVAL_HEAD_ENDPOINT has this server play one environment of one seat, but it has "
                    f"{', '.join(opened)}, the first of {info.seats} seats: leave it out, or start another server"
                )
            self.table = EpisodeTable(info, make, settings.environment_step_seconds)
            stack.push_async_callback(self.table.end)
            for _, _, made in opened.values():
                self.table.release(made)
            stack.callback(asyncio.create_task(self._sweep()).cancel)
            if settings.eval_head_endpoint is not None:
                self.player = await stack.enter_async_context(Player(settings, self.table).playing())
            yield

    async def _open(
        self, name: str, stack: AsyncExitStack
    ) -> tuple[MakeEnvironment, wire.EnvironmentInfo, Environment]:
        """Load an environment until ``stack`` closes; return a factory, its description and a trial instance."""
        sources = [source for source, environment in self.settings.environments.items() if environment == name]
        variable = f"environment of {', '.join(sources)} in SOURCES" if any(sources) else "ENVIRONMENT"
        make, trial = await open_with_trial(
            self.settings.model_copy(update={"environment": name}), stack, variable=variable
        )
        return make, describe(name, make, trial, self.settings.most_steps), trial

    @property
    def health(self) -> Health:
        """Healthy, unless too many environments hang."""
        about = wire.EnvironmentServerHealth(
            name=self.settings.environment_server_name,
            environment=self.table.info.id,
            pushing=self.player is not None,
            instance=self.table.instance,
        )
        is_well = self.table.stuck <= MAX_STUCK
        return Health(status="healthy" if is_well else "unhealthy", service=SERVICE, **about.model_dump())

    def stats(self) -> dict[str, Any]:
        """Return the content of GET /stats."""
        return {
            "active": len(self.table.active),
            "episodes": self.table.counts,
            "stuck": self.table.stuck,
            "openenv_sessions": self.table.sockets,
            "push": None if self.player is None else self.player.stats(),
        }

    async def reset(self, request: wire.ResetRequest) -> wire.ResetReply:
        """Begin episodes; a repeated request id gets the same reply again.

        Raises:
            ProblemError: the episodes cannot be begun.
        """
        reply = self._replies.get(request.request_id or "")
        if reply is None:
            if request.source not in self.hosted:
                raise unknown_source(request.source, filter(None, self.hosted))
            make, info = self.hosted[request.source]
            if isinstance(make, Tasks) and request.split is not None:
                make = make.maker(request.split)
            reply = asyncio.ensure_future(self.table.reset(request.episodes, request.seed, (make, info)))
            if request.request_id is not None:
                self._replies[request.request_id] = reply
            if len(self._replies) > KEPT_REPLIES:
                self._replies.popitem(last=False)
        try:
            # Shielded, because the client may leave and ask again.
            return await asyncio.shield(reply)
        except ProblemError:
            # Nothing was begun, so the same request may be tried again.
            self._replies.pop(request.request_id or "", None)
            raise

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if dropped := self.table.drop_idle(IDLE_SECONDS):
                log.warning("dropped episodes that were not stepped for five minutes", episodes=dropped)


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
        self._reports: list[wire.FinishedEpisode] = []
        """Episodes that have ended since the last request to the head."""
        self._begun = 0
        self._counts = {"finished": 0, "lost": 0}
        self._trouble: str | None = None

    def stats(self) -> dict[str, Any]:
        """Return counts, and as ``trouble`` why episodes do not continue at the moment."""
        return {"head": self._head.url, **self._counts, "trouble": self._trouble}

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
        sizes = [1] * count if self._table.info.state.kind is wire.StateKind.MESSAGES else [count]
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

    async def step(self, moves: Sequence[tuple[Episode, wire.Action]]) -> list[wire.StepResult]:
        """See Arena."""
        return await self._table.step([episode.step_with(action) for episode, action in moves])

    async def end(self, episodes: Sequence[Episode]) -> None:
        """See Arena."""
        await self._table.close([episode.id for episode in episodes if not episode.has_ended])

    async def _ask(self, episodes: Sequence[Episode]) -> list[Decision]:
        """Return the head's decisions, after any number of attempts, and report the episodes that have ended."""
        states, positions = [episode.state for episode in episodes], [episode.position for episode in episodes]
        while episodes or self._reports:
            reports, self._reports = self._reports, []
            try:
                reply = await self._head.act(states, episodes=positions, finished=reports)
            except (DependencyLostError, RequestRefusedError) as error:
                # The next request repeats the reports; the head counts each once.
                self._reports += reports
                self._report(str(error))
                self._table.touch([episode.id for episode in episodes])
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if episodes and self._trouble is not None:
                log.info("the head gives actions again")
                self._trouble = None
            return list(map(Decision, reply.actions, reply.policy_versions))
        return []

    async def _settle(self, episode: Episode) -> None:
        """Count an episode, and report it to the head if it has ended."""
        if episode.has_ended:
            self._counts["finished"] += 1
            self._reports.append(episode.report)
        else:
            # It is not played again, because the same action would be refused again.
            self._counts["lost"] += 1
            self._report(f"an episode was given up: {episode.detail}")

    def _report(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.warning("episodes do not continue", trouble=trouble)
        self._trouble = trouble


def create_app(settings: EnvironmentSettings) -> FastAPI:
    """Return the environment server's application."""
    server = Server(settings)
    app = create_service_app(
        SERVICE,
        settings=settings,
        lifespan=server.running,
        health=lambda: server.health,
        stats=server.stats,
        description=__doc__ or "",
    )

    @app.post("/reset")
    async def post_reset(request: wire.ResetRequest) -> wire.ResetReply:
        """Begin episodes."""
        return await server.reset(request)

    @app.post("/step")
    async def post_step(request: wire.StepRequest) -> wire.StepReply:
        """Take one action in each of some episodes; a failure of one does not affect the others."""
        return wire.StepReply.model_construct(results=await server.table.step(request.steps))

    @app.post("/close")
    async def post_close(request: wire.CloseRequest) -> wire.CloseReply:
        """End episodes early."""
        closed = await server.table.close(request.episodes)
        return wire.CloseReply(closed=closed, unknown=len(set(request.episodes)) - closed)

    add_openenv_routes(app, settings.token, lambda: server.table)
    return app
