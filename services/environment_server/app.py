"""The environment server's routes."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.environment_server.catalogue import Catalogue, UnknownEnvironmentError
from services.environment_server.environments import EnvironmentBrokenError, EnvironmentHungError
from services.environment_server.episodes import MAX_STUCK, EpisodeTable, FullError, StuckError
from services.environment_server.player import Player
from services.environment_server.settings import EnvironmentSettings
from services.http.app import create_service_app, model_response
from services.http.problems import ProblemError
from services.protocol import Health
from services.protocol.evaluation import (
    CloseReply,
    CloseRequest,
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
KEPT_REPLIES = 1000


class EnvironmentsReply(BaseModel):
    """Reply of GET /environments: what requests may name, and what they get when they name none."""

    default: str
    environments: list[str]


class Server:
    """What the routes serve from."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.settings = settings
        self.catalogue = Catalogue(settings)
        self.table = EpisodeTable(settings, self.catalogue)
        self.instance_key = secrets.token_hex(16)
        self.player: Player | None = None
        self._replies: OrderedDict[str, asyncio.Future[ResetReply]] = OrderedDict()

    @property
    def health(self) -> Health:
        """Healthy, unless too many environments hang."""
        about = EnvironmentServerHealth(
            name=self.settings.environment_server_name,
            instance=fingerprint(self.instance_key),
            environment=self.settings.environment,
            pushing=self.player is not None,
            max_episodes=self.settings.environment_max_episodes,
        )
        is_well = self.table.stuck <= MAX_STUCK
        return Health(status="healthy" if is_well else "unhealthy", service=SERVICE, **about.model_dump())

    def stats(self) -> dict[str, Any]:
        """The content of GET /stats."""
        return {
            "name": self.settings.environment_server_name,
            "environment": self.settings.environment,
            "active": self.table.active,
            "active_by_environment": self.table.by_environment(),
            "episodes": dict(self.table.counts),
            "stuck": self.table.stuck,
            "push": None if self.player is None else self.player.stats(),
        }

    async def reset(self, request: ResetRequest) -> ResetReply:
        """Begins episodes; a repeated request id gets what it got before."""
        key = request.request_id
        if key is None:
            return await self._begin(request)
        if key not in self._replies:
            self._replies[key] = asyncio.ensure_future(self._begin(request))
            if len(self._replies) > KEPT_REPLIES:
                self._replies.popitem(last=False)
        reply = self._replies[key]
        try:
            return await asyncio.shield(reply)
        except ProblemError:
            # It has begun nothing, and may be tried again.
            self._replies.pop(key, None)
            raise

    async def _begin(self, request: ResetRequest) -> ResetReply:
        try:
            environment, episodes = await self.table.reset(request.environment, request.episodes, request.seed)
        except EnvironmentHungError as error:
            raise ProblemError(503, str(error), {"Retry-After": "5"}) from error
        except (UnknownEnvironmentError, EnvironmentBrokenError) as error:
            raise ProblemError(422, f"{error}; GET /environments lists what there is") from error
        except FullError as error:
            raise ProblemError(429, f"{error}; end some, or ask another server", {"Retry-After": "1"}) from error
        except StuckError as error:
            raise ProblemError(503, f"{error}; this server has to be restarted") from error
        return ResetReply.model_construct(environment=environment, episodes=episodes)


def fingerprint(instance_key: str) -> str:
    """What of an instance key may be shown: enough to recognise it, not enough to use it."""
    return hashlib.sha256(instance_key.encode()).hexdigest()[:16]


def create_app(settings: EnvironmentSettings) -> FastAPI:
    """The environment server."""
    server = Server(settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        try:
            await server.catalogue.maker(settings.environment)
        except UnknownEnvironmentError as error:
            raise ConfigurationError(f"ENVIRONMENT is {settings.environment!r}: {error}") from error
        sweeping = asyncio.create_task(_sweep(server.table))
        try:
            if settings.eval_head_endpoint is None:
                yield
            else:
                async with Player(settings, server.table, server.instance_key).playing() as server.player:
                    yield
        finally:
            sweeping.cancel()
            server.table.close_all()
            await server.catalogue.close()

    app = create_service_app(
        SERVICE,
        settings=settings,
        lifespan=lifespan,
        health=lambda: server.health,
        stats=server.stats,
        description=__doc__ or "",
        max_body_bytes=MAX_BODY_BYTES,
    )

    @app.get("/environments", response_model=EnvironmentsReply)
    async def get_environments() -> Response:
        """The environments that requests may name."""
        listed = server.catalogue.listed()
        return model_response(EnvironmentsReply(default=settings.environment, environments=listed))

    @app.post("/reset", response_model=ResetReply)
    async def post_reset(request: ResetRequest) -> Response:
        """Begins episodes."""
        return model_response(await server.reset(request))

    @app.post("/step", response_model=StepReply)
    async def post_step(request: StepRequest) -> Response:
        """Takes one action in each of some episodes; what happens to one does not reach the others."""
        return model_response(StepReply.model_construct(results=await server.table.step(request.steps)))

    @app.post("/close", response_model=CloseReply)
    async def post_close(request: CloseRequest) -> Response:
        """Ends episodes before their end."""
        closed = server.table.close(request.episodes)
        return model_response(CloseReply(closed=closed, unknown=len(set(request.episodes)) - closed))

    return app


async def _sweep(table: EpisodeTable) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        if dropped := table.drop_idle():
            log.warning("episodes dropped: nobody stepped them (ENVIRONMENT_IDLE_SECONDS)", episodes=dropped)
