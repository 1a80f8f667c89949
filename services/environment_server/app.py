"""The environment server's routes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.environment_server.catalogue import Environment, MakeEnvironment, describe, open_with_trial
from services.environment_server.environments import Tasks
from services.environment_server.episodes import MAX_STUCK, EpisodeTable
from services.environment_server.openenv_server import Host, add_openenv_routes
from services.environment_server.player import Player
from services.environment_server.settings import EnvironmentSettings
from services.http.app import create_service_app
from services.http.problems import ProblemError, unknown_source
from services.protocol.base import Health
from services.protocol.evaluation import (
    CloseReply,
    CloseRequest,
    EnvironmentInfo,
    EnvironmentServerHealth,
    ResetReply,
    ResetRequest,
    StepReply,
    StepRequest,
)

log = get_logger(__name__)

SERVICE = "environment-server"
MAX_BODY_BYTES = 16 * 2**20
SWEEP_SECONDS = 1.0
IDLE_SECONDS = 300.0
"""An episode that was not stepped for this time is dropped: its client is gone. A head's restart takes less."""
KEPT_REPLIES = 1000


class Server:
    """The state behind the routes. ``table`` and ``openenv`` exist while the server runs."""

    table: EpisodeTable
    openenv: Host
    hosted: dict[str, tuple[MakeEnvironment, EnvironmentInfo]]
    """The environments by the source that plays them; "" has the first, which OpenEnv's clients and a head play."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.settings = settings
        self.player: Player | None = None
        self._replies: OrderedDict[str, asyncio.Future[ResetReply]] = OrderedDict()

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
            make, info, trial = next(iter(opened.values()))
            self.hosted[""] = make, info
            tasks = make if isinstance(make, Tasks) else None
            if len(opened) > 1 and settings.eval_head_endpoint is not None:
                raise ConfigurationError(
                    f"EVAL_HEAD_ENDPOINT has this server play one environment, but SOURCES has {', '.join(opened)}: "
                    "leave it out, or start another server with ENVIRONMENT alone"
                )
            if info.seats > 1 and settings.eval_head_endpoint is not None:
                raise ConfigurationError(
                    f"ENVIRONMENT {info.id} has {info.seats} seats, and an evaluation head plays environments of one: "
                    "leave out EVAL_HEAD_ENDPOINT"
                )
            self.table = EpisodeTable(info, make, settings.environment_step_seconds)
            stack.push_async_callback(self.table.end)
            for _, _, made in opened.values():
                self.table.release(made)
            self.openenv = Host(self.table, tasks, getattr(tasks or trial, "tools", ()))
            stack.callback(asyncio.create_task(self._sweep()).cancel)
            if settings.eval_head_endpoint is not None:
                self.player = await stack.enter_async_context(Player(settings, self.table).playing())
            yield

    async def _open(self, name: str, stack: AsyncExitStack) -> tuple[MakeEnvironment, EnvironmentInfo, Environment]:
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
        about = EnvironmentServerHealth(
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
            "openenv_sessions": self.openenv.sessions,
            "push": None if self.player is None else self.player.stats(),
        }

    async def reset(self, request: ResetRequest) -> ResetReply:
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
            reply = asyncio.ensure_future(self.table.reset(request.episodes, request.seed, make, info))
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
        max_body_bytes=MAX_BODY_BYTES,
    )

    @app.post("/reset")
    async def post_reset(request: ResetRequest) -> ResetReply:
        """Begin episodes."""
        return await server.reset(request)

    @app.post("/step")
    async def post_step(request: StepRequest) -> StepReply:
        """Take one action in each of some episodes; a failure of one does not affect the others."""
        return StepReply.model_construct(results=await server.table.step(request.steps))

    @app.post("/close")
    async def post_close(request: CloseRequest) -> CloseReply:
        """End episodes early."""
        closed = await server.table.close(request.episodes)
        return CloseReply(closed=closed, unknown=len(set(request.episodes)) - closed)

    add_openenv_routes(app, settings.token, lambda: server.openenv)
    return app
