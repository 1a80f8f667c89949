"""The evaluation head's routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import Response

from services.evaluation_head import dashboard
from services.evaluation_head.discovery import Source
from services.evaluation_head.head import SERVICE, Head
from services.evaluation_head.settings import HeadSettings
from services.http.app import create_service_app, model_response
from services.protocol.evaluation import DiscoveryReply, EvaluateReply, EvaluateRequest

MAX_BODY_BYTES = 16 * 2**20


def create_app(settings: HeadSettings, sources: list[Source] | None = None) -> FastAPI:
    """The evaluation head; ``sources`` are where it looks for servers, by default what the settings say."""
    head = Head(settings, sources)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with head.running():
            yield

    app = create_service_app(
        SERVICE,
        settings=settings,
        lifespan=lifespan,
        health=lambda: head.health,
        stats=head.stats,
        description=__doc__ or "",
        public=dashboard.PUBLIC,
        max_body_bytes=MAX_BODY_BYTES,
    )
    dashboard.add_dashboard(app, head)

    @app.post("/evaluate", response_model=EvaluateReply)
    async def post_evaluate(request: EvaluateRequest) -> Response:
        """Actions for one state or many, in order; reports of episodes that have ended."""
        return model_response(await head.evaluate(request))

    @app.get("/discovered", response_model=DiscoveryReply)
    async def get_discovered() -> Response:
        """The environment servers that were found when they were last looked for."""
        return model_response(head.discovery.reply())

    @app.post("/discover", response_model=DiscoveryReply)
    async def post_discover() -> Response:
        """Looks for environment servers, and answers when that is done."""
        await head.discovery.look()
        return model_response(head.discovery.reply())

    return app
