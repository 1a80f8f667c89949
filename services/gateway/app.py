"""The gateway's application: its routes for the trainer, and those of agents.

Agents have three APIs, and two ways to say which session: in the path, or as API key.
"""

from __future__ import annotations

import contextlib
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from services.gateway import responses_api
from services.gateway.chat_api import CHAT, Api
from services.gateway.gateway import Gateway
from services.gateway.messages_api import MESSAGES
from services.gateway.requests import ChatRequest, unforced
from services.gateway.responses_api import RESPONSES
from services.gateway.sessions import Asker, Session
from services.gateway.settings import GatewaySettings
from services.http.app import create_service_app
from services.http.json_body import JsonRequest, JsonRoute, is_json
from services.http.problems import ProblemError, refuse
from services.protocol.sessions import CreateSessionRequest, FinishRequest, RewardRequest, SessionReply, Trace

MAX_BODY_BYTES = 8 * 2**20
"""More than the text of a million tokens. Encoding a text takes time and memory in proportion to its length."""


def create_app(settings: GatewaySettings, *, own_process: bool = False) -> FastAPI:
    """Return the gateway's application; it loads tokenizer and sessions once it runs.

    With ``own_process`` nothing else runs in this process, so that it loads transformers without torch.
    """
    gateway = Gateway(settings, lambda error: app.state.lifecycle.fail(error), own_process=own_process)

    app = create_service_app(
        "gateway",
        settings=settings,
        lifespan=lambda _app: gateway,
        stats=gateway.stats,
        description=__doc__ or "",
        own_keys=AGENT_PATHS,
        max_body_bytes=MAX_BODY_BYTES,
    )
    _add_session_routes(app, gateway)
    _add_agent_routes(app, Agents(gateway))
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
Find = Callable[[Request], Awaitable[Session]]
Answer = Callable[[Request, Session], Awaitable[Any]]


def _add_agent_routes(app: FastAPI, agents: Agents) -> None:
    """Add the agents' routes, once with the session in the path and once with the session as key."""
    answers: list[tuple[str, str, Answer]] = [
        *(("POST", api.path, partial(agents.answer, api)) for api in (CHAT, MESSAGES, RESPONSES)),
        ("POST", f"{MESSAGES.path}/count_tokens", agents.count_tokens),
        ("GET", f"{RESPONSES.path}/{{response_id}}", agents.find_response),
        ("GET", "/models", agents.list_models),
    ]
    options: dict[str, Any] = {"tags": ["agents"], "route_class_override": AgentRoute}
    body = {"requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}, "required": True}}
    for prefix, find in (("/sessions/{session_id}/v1", agents.find_by_path), ("/v1", agents.find_by_key)):
        for method, path, answer in answers:
            extra = body if method == "POST" else None
            app.router.add_api_route(
                prefix + path, _endpoint(find, answer), methods=[method], openapi_extra=extra, **options
            )


def _endpoint(find: Find, answer: Answer) -> Callable[[Request], Awaitable[Any]]:
    async def endpoint(http: Request) -> Any:
        return await answer(http, await find(http))

    return endpoint


class AgentRoute(JsonRoute):
    """A route that its endpoint answers alone: FastAPI's dependencies would take as long as the rest of a call."""

    def __init__(self, path: str, endpoint: Callable[[Request], Awaitable[Any]], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            response: Response = await self.endpoint(JsonRequest(scope, receive))
            await response(scope, receive, send)


class Agents:
    """The answers to agents' requests, each of which belongs to a session."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def find_by_path(self, http: Request) -> Session:
        """Return the session that the path names; where JOBGROUP_TOKEN is set, the key must be the token or the id."""
        token, key, session_id = self._gateway.settings.token, _key(http), http.path_params["session_id"]
        if token and not any(hmac.compare_digest(key, accepted.encode()) for accepted in (token, session_id)):
            raise ProblemError(401, "give the session's id as API key", {"WWW-Authenticate": "Bearer"})
        return await self._gateway.find(session_id)

    async def find_by_key(self, http: Request) -> Session:
        """Return the session whose id is the API key."""
        session = await self._gateway.get(_key(http).decode("utf-8", "replace"))
        if session is None:
            raise ProblemError(401, "give a session's id as API key", {"WWW-Authenticate": "Bearer"})
        return session

    async def answer(self, api: Api, http: Request, session: Session) -> Response:
        """Return the model's next turn."""
        request = await self._read(api, http, session)
        call = await self._gateway.calls.complete(session, request, api, Asker(http.headers))
        if not request.stream:
            return Response(orjson.dumps(call.reply), media_type="application/json")
        return Response(b"".join(api.stream(call.reply, request)), media_type="text/event-stream")

    async def count_tokens(self, http: Request, session: Session) -> dict[str, Any]:
        """Return the length of the prompt that a request of the Messages API would have."""
        session.check_open()
        request = await self._read(MESSAGES, http, session)
        return {"input_tokens": await self._gateway.calls.count(session, request)}

    async def find_response(self, http: Request, session: Session) -> dict[str, Any]:
        """Return an earlier response of the Responses API."""
        response_id = http.path_params["response_id"]
        response = responses_api.find(session, response_id)
        if response is None:
            refuse(404, f"session {session.id} has no response {response_id}", "response_not_found")
        return response

    async def list_models(self, _http: Request, _session: Session) -> dict[str, Any]:
        """Return the content of GET /models."""
        return self._gateway.models()

    async def _read(self, api: Api, http: Request, session: Session) -> ChatRequest:
        body: Mapping[str, Any] = await _json_object(http)
        is_auto = self._gateway.settings.forced_tool_calls == "auto"
        return api.request(unforced(body) if is_auto else body, session)


async def _json_object(http: Request) -> dict[str, Any]:
    """Return the object in a request's body; raise ProblemError for any other body."""
    if not is_json(http):
        raise ProblemError(415, "send the body as JSON, with the header 'Content-Type: application/json'")
    try:
        parsed = await http.json() if await http.body() else None
    except orjson.JSONDecodeError as error:
        raise ProblemError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ProblemError(422, "the body must be a JSON object")
    return parsed


def _key(http: Request) -> bytes:
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else http.headers.get("x-api-key", "")).strip().encode()
