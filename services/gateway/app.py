"""The gateway's routes: sessions for the trainer, and OpenAI's chat completions for agents."""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response

from services.gateway.gateway import Gateway
from services.gateway.replies import stream_of
from services.gateway.requests import ChatRequest
from services.gateway.sessions import Session
from services.gateway.settings import GatewaySettings
from services.http.app import JsonResponse, create_service_app, model_response
from services.http.problems import ProblemError
from services.protocol.sessions import CreateSessionRequest, RewardRequest, SessionReply, Trace

AGENT_PATHS = re.compile(r"/v1/.*|/sessions/[^/]+/v1/.*")
"""The agents' paths, whose routes ask for the session's own key."""


def create_app(settings: GatewaySettings, *, own_process: bool = False) -> FastAPI:
    """Return the gateway's application; it loads tokenizer and sessions once it runs.

    In a process of its ``own`` it loads transformers without torch.
    """
    gateway = Gateway(settings, own_process=own_process)

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
    )
    app.state.gateway = gateway
    _add_session_routes(app, gateway)
    _add_agent_routes(app, gateway)
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


async def _session_of_path(session_id: str, http: Request) -> Session:
    """Return the session that the path names; where JOBGROUP_TOKEN is set, the key must be the token or the id."""
    gateway: Gateway = http.app.state.gateway
    token, key = gateway.settings.token, _key(http)
    if token and not any(hmac.compare_digest(key, known.encode()) for known in (token, session_id)):
        raise ProblemError(401, "give the session's id as API key", {"WWW-Authenticate": "Bearer"})
    return await gateway.find(session_id)


async def _session_of_key(http: Request) -> Session:
    """Return the session whose id is the API key."""
    gateway: Gateway = http.app.state.gateway
    session = await gateway.get(_key(http).decode("utf-8", "replace"))
    if session is None:
        raise ProblemError(401, "give a session's id as API key", {"WWW-Authenticate": "Bearer"})
    return session


OfPath = Annotated[Session, Depends(_session_of_path)]
OfKey = Annotated[Session, Depends(_session_of_key)]


def _add_agent_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/sessions/{session_id}/v1/models", tags=["openai"])
    async def models_of_path(_session: OfPath) -> Response:
        """List the model in training."""
        return JsonResponse(gateway.models())

    @app.get("/v1/models", tags=["openai"])
    async def models_of_key(_session: OfKey) -> Response:
        """List the model in training."""
        return JsonResponse(gateway.models())

    @app.post("/sessions/{session_id}/v1/chat/completions", tags=["openai"])
    async def chat_of_path(body: dict[str, Any], session: OfPath) -> Response:
        """Answer a conversation within the session."""
        return await _answer(gateway, session, body)

    @app.post("/v1/chat/completions", tags=["openai"])
    async def chat_of_key(body: dict[str, Any], session: OfKey) -> Response:
        """Answer a conversation within the session whose id is the API key."""
        return await _answer(gateway, session, body)


async def _answer(gateway: Gateway, session: Session, body: dict[str, Any]) -> Response:
    request = ChatRequest.of(body)
    reply = await gateway.calls.complete(session, request)
    if not request.stream:
        return JsonResponse(reply)
    events = stream_of(reply, includes_usage=request.stream_options.include_usage)
    return Response(b"".join(events), media_type="text/event-stream")


def _key(http: Request) -> bytes:
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else http.headers.get("x-api-key", "")).strip().encode()
