"""The gateway's application, and its routes for the trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import Response

from services.gateway.agent_routes import AGENT_PATHS, add_agent_routes
from services.gateway.gateway import Gateway
from services.gateway.settings import GatewaySettings
from services.http.app import create_service_app, model_response
from services.protocol.sessions import CreateSessionRequest, RewardRequest, SessionReply, Trace

MAX_BODY_BYTES = 8 * 2**20
"""More than the text of a million tokens. Encoding a text takes time and memory in proportion to its length."""


def create_app(settings: GatewaySettings, *, own_process: bool = False) -> FastAPI:
    """Return the gateway's application; it loads tokenizer and sessions once it runs.

    In a process of its ``own`` it loads transformers without torch.
    """
    gateway = Gateway(settings, lambda error: app.state.lifecycle.fail(error), own_process=own_process)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with gateway:
            yield

    app = create_service_app(
        "gateway",
        settings=settings,
        lifespan=lifespan,
        stats=gateway.stats,
        description=__doc__ or "",
        own_keys=AGENT_PATHS,
        max_body_bytes=MAX_BODY_BYTES,
    )
    _add_session_routes(app, gateway)
    add_agent_routes(app, gateway)
    return app


def _add_session_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/sessions", response_model=SessionReply, tags=["sessions"])
    async def post_session(request: CreateSessionRequest) -> Response:
        """Open a session. The same request again changes nothing; another request with the same id is refused, 409."""
        return model_response(await gateway.create(request))

    @app.get("/sessions/{session_id}", response_model=SessionReply, tags=["sessions"])
    async def get_session(session_id: str) -> Response:
        """Return a session's state."""
        return model_response((await gateway.find(session_id)).reply())

    @app.post("/sessions/{session_id}/reward", response_model=SessionReply, tags=["sessions"])
    async def post_reward(session_id: str, request: RewardRequest) -> Response:
        """Set the episode's reward, or the reason why it has none. Refused, 409, once the session is finished."""
        return model_response(await gateway.set_reward(session_id, request))

    @app.post("/sessions/{session_id}/finish", response_model=Trace, tags=["sessions"])
    async def post_finish(session_id: str) -> Response:
        """End the session and return its trace; the same trace again if it has ended already."""
        return model_response(await gateway.finish(session_id))

    @app.get("/sessions/{session_id}/trace", response_model=Trace, tags=["sessions"])
    async def get_trace(session_id: str) -> Response:
        """Return the trace of the calls so far."""
        return model_response((await gateway.find(session_id)).trace())

    @app.delete("/sessions/{session_id}", status_code=204, tags=["sessions"])
    async def delete_session(session_id: str) -> Response:
        """Delete a session and everything stored of it; an unknown session is no error."""
        await gateway.delete(session_id)
        return Response(status_code=204)
