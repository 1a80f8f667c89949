"""The gateway's application: its routes for the trainer, and those of agents.

Agents have three APIs, and two ways to say which session: in the path, or as API key.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import responses_api
from services.gateway.chat_api import CHAT, Api
from services.gateway.gateway import Gateway
from services.gateway.messages_api import MESSAGES
from services.gateway.requests import ChatRequest, unforced
from services.gateway.responses_api import RESPONSES
from services.gateway.sessions import Asker, Session
from services.gateway.settings import GatewaySettings
from services.http.app import create_service_app
from services.http.json_body import JsonRequest, JsonResponse, JsonRoute, is_json
from services.http.problems import ProblemError, refuse
from services.http.server import has_left
from services.protocol.chat import TOOLS
from services.protocol.sessions import CreateSessionRequest, FinishRequest, RewardRequest, SessionReply, Trace

MAX_BODY_BYTES = 8 * 2**20
"""More than the text of a million tokens. Encoding a text takes time and memory in proportion to its length."""


def create_app(settings: GatewaySettings, *, own_process: bool = False) -> FastAPI:
    """Return the gateway's application; it loads tokenizer and sessions once it runs.

    With ``own_process`` nothing else runs in this process, so that it loads transformers without torch.
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
    @app.post("/sessions", tags=["sessions"])
    async def post_session(request: CreateSessionRequest) -> SessionReply:
        """Open a session. The same request again changes nothing; another request with the same id is refused, 409."""
        return await gateway.create(request)

    @app.get("/sessions/{session_id}", tags=["sessions"])
    async def get_session(session_id: str) -> SessionReply:
        """Return a session's state."""
        return (await gateway.find(session_id)).reply()

    @app.post("/sessions/{session_id}/reward", tags=["sessions"])
    async def post_reward(session_id: str, request: RewardRequest) -> SessionReply:
        """Set the episode's reward, or the reason why it has none. Refused, 409, once the session is finished."""
        return await gateway.set_reward(session_id, request)

    @app.post("/sessions/{session_id}/finish", tags=["sessions"])
    async def post_finish(session_id: str, request: FinishRequest | None = None) -> Trace:
        """End the session and return its trace; the same trace again if it has ended already.

        A body sets the reward, refused with 409 if the session has ended with another one, and names sessions to delete
        because their traces have arrived.
        """
        return await gateway.finish(session_id, request)

    @app.get("/sessions/{session_id}/trace", tags=["sessions"])
    async def get_trace(session_id: str) -> Trace:
        """Return the trace of the calls so far."""
        return (await gateway.find(session_id)).trace()

    @app.delete("/sessions/{session_id}", status_code=204, tags=["sessions"])
    async def delete_session(session_id: str) -> Response:
        """Delete a session and everything stored of it; an unknown session is not an error."""
        await gateway.delete(session_id)
        return Response(status_code=204)


AGENT_PATHS = re.compile(r"/v1/.*|/sessions/[^/]+/v1/.*")
"""The agents' paths, whose routes ask for the session's own key."""
PREFIX = "/sessions/{session_id}/v1"
_CALL = re.compile(r"/sessions/(?P<id>[^/]+)/v1(?P<path>/.+)")


def add_agent_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add the agents' routes, once with the session in the path and once with the session as key."""

    async def of_path(http: Request, session_id: str) -> Session:
        """Return the session that the path names; where JOBGROUP_TOKEN is set, the key must be the token or the id."""
        token, key = gateway.settings.token, _key(http)
        if token and not any(hmac.compare_digest(key, accepted.encode()) for accepted in (token, session_id)):
            raise ProblemError(401, "give the session's id as API key", {"WWW-Authenticate": "Bearer"})
        return await gateway.find(session_id)

    async def of_key(http: Request) -> Session:
        """Return the session whose id is the API key."""
        session = await gateway.get(_key(http).decode("utf-8", "replace"))
        if session is None:
            raise ProblemError(401, "give a session's id as API key", {"WWW-Authenticate": "Bearer"})
        return session

    in_path, by_key = _router(gateway, of_path), _router(gateway, of_key)
    app.include_router(in_path, prefix=PREFIX)
    app.include_router(by_key, prefix="/v1")
    # Appended, so that it is inside ServiceMiddleware.
    app.user_middleware.append(Middleware(DirectCalls, find=of_path, router=in_path))


class DirectCalls:
    """ASGI middleware that answers calls of sessions in the path, which are nearly all requests, by their endpoints.

    FastAPI's routing and dependencies would take as long as the rest of a call. It gets everything else, also bodies
    that are not objects, which it refuses.
    """

    def __init__(self, app: ASGIApp, find: Callable[[Request, str], Awaitable[Session]], router: APIRouter) -> None:
        self._app = app
        self._find = find
        routes = (route for route in router.routes if isinstance(route, APIRoute) and "POST" in (route.methods or ()))
        self._routes = {route.path: (route.endpoint, Route(PREFIX + route.path, route.endpoint)) for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call of a session; leave everything else to FastAPI."""
        call = _CALL.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if call is None or call["path"] not in self._routes:
            await self._app(scope, receive, send)
            return
        request = JsonRequest(scope, receive)
        try:
            body = await _json_object(request)
        except ClientDisconnect:
            return
        if body is None:
            await self._app(scope, partial(_received, await request.body()), send)
            return
        endpoint, scope["route"] = self._routes[call["path"]]  # The route is a label of the metrics.
        response: Response = await endpoint(request, body, await self._find(request, call["id"]))
        await response(scope, receive, send)


class Reply(Response):
    """A reply to an agent; it calls ``on_taken`` once the connection has taken the whole reply."""

    def __init__(self, content: bytes, media_type: str, on_taken: Callable[[], None]) -> None:
        super().__init__(content, media_type=media_type)
        self._on_taken = on_taken

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # The server waits with the second part until the connection has taken the first one.
        for part in (self.body, b""):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if not has_left(receive):
            self._on_taken()
        await send({"type": "http.response.body", "body": b""})


async def _json_object(request: JsonRequest) -> dict[str, Any] | None:
    """Return the object in a request's body; None for any other body."""
    content = await request.body()
    try:
        parsed = await request.json() if content and is_json(request) else None
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None


async def _received(body: bytes) -> Message:
    """Return the message of a whole body that was received before."""
    return {"type": "http.request", "body": body, "more_body": False}


def _key(http: Request) -> bytes:
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else http.headers.get("x-api-key", "")).strip().encode()


def _router(gateway: Gateway, session_of: Callable[..., Awaitable[Session]]) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["agents"])
    asked = Depends(session_of)
    _add_tools(router, gateway, asked)

    def read(api: Api, session: Session, body: dict[str, Any]) -> ChatRequest:
        is_auto = gateway.settings.forced_tool_calls == "auto"
        return api.request(unforced(body) if is_auto else body, session)

    async def answer(api: Api, session: Session, body: dict[str, Any], http: Request) -> Response:
        request = read(api, session, body)
        call = await gateway.calls.complete(session, request, api, Asker(http))
        on_taken = partial(session.hand_over, call.name)
        if not request.stream:
            return Reply(orjson.dumps(call.reply), "application/json", on_taken)
        return Reply(b"".join(api.stream(call.reply, request)), "text/event-stream", on_taken)

    @router.get("/models")
    async def get_models(_session: Session = asked) -> Response:
        """List the model in training."""
        return JsonResponse(gateway.models())

    @router.post(CHAT.path)
    async def post_chat(http: Request, body: dict[str, Any], session: Session = asked) -> Response:
        """Answer a conversation, as OpenAI's chat completions have it."""
        return await answer(CHAT, session, body, http)

    @router.post(MESSAGES.path)
    async def post_messages(http: Request, body: dict[str, Any], session: Session = asked) -> Response:
        """Answer a conversation, as Anthropic's Messages API has it."""
        return await answer(MESSAGES, session, body, http)

    @router.post(f"{MESSAGES.path}/count_tokens")
    async def post_count_tokens(_http: Request, body: dict[str, Any], session: Session = asked) -> Response:
        """Return the number of tokens of a conversation's prompt."""
        session.check_open()
        return JsonResponse({"input_tokens": await gateway.calls.count(session, read(MESSAGES, session, body))})

    @router.post(RESPONSES.path)
    async def post_responses(http: Request, body: dict[str, Any], session: Session = asked) -> Response:
        """Answer a conversation, as OpenAI's Responses API has it."""
        return await answer(RESPONSES, session, body, http)

    @router.get(f"{RESPONSES.path}/{{response_id}}")
    async def get_response(response_id: str, session: Session = asked) -> Response:
        """Return a response that was given before."""
        response = responses_api.find(session, response_id)
        if response is None:
            refuse(404, f"session {session.id} has no response {response_id}", "response_not_found")
        return JsonResponse(response)

    return router


def _add_tools(router: APIRouter, gateway: Gateway, asked: Any) -> None:
    @router.get("/tools")
    async def get_tools(_session: Session = asked) -> Response:
        """List the tools that run programs, in the form of OpenAI's requests."""
        return JsonResponse(TOOLS)

    @router.post("/tools")
    async def post_tool_call(_http: Request, body: dict[str, Any], session: Session = asked) -> Response:
        """Run the program of a tool call in the session's box, and return the message with its output."""
        return JsonResponse(await gateway.tools.call(session, body))
