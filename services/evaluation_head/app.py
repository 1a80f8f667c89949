"""The evaluation head's routes."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from services.evaluation_head import dashboard
from services.evaluation_head.bodies import BinaryRoute, read_request
from services.evaluation_head.head import SERVICE, Head
from services.evaluation_head.settings import HeadSettings
from services.http.app import create_service_app, model_response
from services.protocol.evaluation import DiscoveryReply, EvaluateReply, EvaluateRequest

MAX_BODY_BYTES = 16 * 2**20


def create_app(settings: HeadSettings) -> FastAPI:
    """Return the evaluation head's application."""
    head = Head(settings)
    app = create_service_app(
        SERVICE,
        settings=settings,
        lifespan=head.running,
        stats=head.stats,
        description=__doc__ or "",
        public=dashboard.PUBLIC,
        max_body_bytes=MAX_BODY_BYTES,
    )
    dashboard.add_dashboard(app, head)

    binary = APIRouter(route_class=BinaryRoute)

    @binary.post("/evaluate", include_in_schema=False)
    async def post_binary_evaluate(http: Request) -> Response:
        request, states = await read_request(http)
        return model_response(await head.evaluate(request, states))

    app.include_router(binary)

    @app.post("/evaluate", response_model=EvaluateReply)
    async def post_evaluate(request: EvaluateRequest) -> Response:
        """Return actions for one state or many, in order; take reports of episodes that have ended.

        States may also be bytes: a body of raw float32 (application/octet-stream) with `shape` and the other fields in
        the query, or MessagePack (application/msgpack) of these fields with `states` as bytes and their `shape`.
        """
        return model_response(await head.evaluate(request))

    @app.get("/discovered", response_model=DiscoveryReply)
    async def get_discovered() -> Response:
        """Return the environment servers that the last look found."""
        return model_response(head.discovery.reply())

    @app.post("/discover", response_model=DiscoveryReply)
    async def post_discover() -> Response:
        """Look for environment servers and return them."""
        await head.discovery.look()
        return model_response(head.discovery.reply())

    return app
