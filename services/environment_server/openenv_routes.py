"""OpenEnv's routes (its version 0.10): WebSockets that play episodes, the environment's description, tools and tasks.

Its HTTP routes ``/reset`` and ``/step`` are left out: they make a new environment at each request, so they can play no
episode, and their paths are those of this server's own routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, ValidationError

from services.core.tasks import run_until_first_ends
from services.environment_server import openenv_mcp
from services.environment_server.openenv_mcp import parse_json
from services.environment_server.openenv_sessions import Session, Sessions
from services.environment_server.openenv_wire import OpenEnvError, schemas
from services.http.app import JsonResponse, version
from services.http.problems import problem_response

NORMAL_CLOSURE = 1000
"""The close code by which a client says that it is done. uvicorn gives 1005 for a socket that was lost."""
SEND_SECONDS = 30.0
"""Limit of sending one frame: a client that does not read has lost its socket."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: str
    data: dict[str, Any] | None = None


def add_openenv_routes(app: FastAPI, token: str | None, sessions: Callable[[], Sessions]) -> None:
    """Add OpenEnv's routes to a service; ``sessions`` returns the server's sessions once it is ready."""

    @app.get("/schema", tags=["openenv"], response_model=dict[str, Any])
    async def get_schema() -> Response:
        """Return the JSON schemas of actions, observations and state."""
        return JsonResponse(schemas(sessions().table.info))

    @app.get("/metadata", tags=["openenv"], response_model=dict[str, Any])
    async def get_metadata() -> Response:
        """Return the environment's name and the version of this server."""
        info = sessions().table.info
        description = f"{info.id}: states are {info.state.kind}, an action is {info.action.kind}"
        empty = dict.fromkeys(("readme_content", "author", "documentation_url"))
        return JsonResponse({"name": info.id, "description": description, "version": version(), **empty})

    @app.get("/state", tags=["openenv"], response_model=dict[str, Any])
    async def get_state() -> Response:
        """Return the state of a new environment; a session's is asked for at its socket."""
        return JsonResponse({"episode_id": None, "step_count": 0})

    @app.post("/mcp", tags=["openenv"], response_model=dict[str, Any])
    async def post_mcp(request: Request) -> Response:
        """Answer a JSON-RPC request for the environment's tools, or for a session."""
        return JsonResponse(await openenv_mcp.answer_text(sessions(), await request.body()))

    @app.websocket("/mcp")
    async def serve_mcp(socket: WebSocket) -> None:
        async def answer(text: str) -> dict[str, Any]:
            return await openenv_mcp.answer_text(sessions(), text)

        if await _accepted(app, socket, token):
            with contextlib.suppress(WebSocketDisconnect, TimeoutError):
                await _talk(socket, answer)

    @app.websocket("/ws")
    async def play(socket: WebSocket) -> None:
        if await _accepted(app, socket, token):
            await _play(socket, sessions())


async def _accepted(app: FastAPI, socket: WebSocket, token: str | None) -> bool:
    """Accept a socket if the service is ready and the client has the token; otherwise refuse with the reason."""
    given = socket.headers.get("authorization", "")
    if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        refusal = problem_response(401, "JOBGROUP_TOKEN is set here: send it as 'Authorization: Bearer <token>'")
    elif not app.state.lifecycle.is_serving:
        refusal = problem_response(503, "the server is starting or stopping; wait until GET /health answers 200")
    else:
        await socket.accept()
        return True
    await socket.send_denial_response(refusal)
    return False


async def _play(socket: WebSocket, sessions: Sessions) -> None:
    """Serve the session of one socket until the client leaves, the session ends, or another socket takes it."""
    try:
        session, taken_over = sessions.attach(socket.query_params.get("session_id"))
    except OpenEnvError as error:
        await _send(socket, _error_frame(error))
        await socket.close()
        return

    async def answer(text: str) -> dict[str, Any] | None:
        return await _answer(sessions, session, text)

    is_over = False
    try:
        await run_until_first_ends(_talk(socket, answer), taken_over.wait())
        is_over = not taken_over.is_set()
        await socket.close(1008 if taken_over.is_set() else 1000, "the session ended, or another socket has taken it")
    except WebSocketDisconnect as left:
        is_over = left.code == NORMAL_CLOSURE
    except (TimeoutError, RuntimeError):
        pass  # the client does not read, or left while the socket was closed
    finally:
        await sessions.detach(session, taken_over, is_over=is_over)


async def _talk(socket: WebSocket, answer: Callable[[str], Awaitable[dict[str, Any] | None]]) -> None:
    """Answer frames one after another until ``answer`` returns None.

    Raises:
        WebSocketDisconnect: the client left; its code says how.
        TimeoutError: the client does not read.
    """
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        frame = await answer(message.get("text") or (message.get("bytes") or b"").decode(errors="replace"))
        if frame is None:
            return
        await _send(socket, frame)


async def _answer(sessions: Sessions, session: Session, text: str) -> dict[str, Any] | None:
    """Return the frame that answers a frame of ``/ws``; None after a message ``close``."""
    try:
        try:
            message = _Message.model_validate(parse_json(text))
        except ValidationError as error:
            raise OpenEnvError("VALIDATION_ERROR", f"the message: {error.errors()[0]['msg']}") from error
        except ValueError as error:
            raise OpenEnvError("INVALID_JSON", f"Invalid JSON: {error}") from error
        session.touch()
        match message.type:
            case "reset":
                return {"type": "observation", "data": await session.reset(message.data or {})}
            case "step" if message.data is not None:
                return {"type": "observation", "data": await session.step(message.data)}
            case "state":
                return {"type": "state", "data": await session.state()}
            case "mcp" if message.data is not None:
                return {"type": "mcp", "data": await openenv_mcp.answer(sessions, message.data)}
            case "step" | "mcp":
                raise OpenEnvError("VALIDATION_ERROR", f"a message {message.type!r} needs data")
            case "close":
                return None
        raise OpenEnvError("UNKNOWN_TYPE", f"Unknown message type: {message.type[:60]}")
    except OpenEnvError as error:
        return _error_frame(error)


def _error_frame(error: OpenEnvError) -> dict[str, Any]:
    return {"type": "error", "data": {"message": str(error), "code": error.code}}


async def _send(socket: WebSocket, frame: dict[str, Any]) -> None:
    async with asyncio.timeout(SEND_SECONDS):
        await socket.send_text(bytes(JsonResponse(frame).body).decode())
