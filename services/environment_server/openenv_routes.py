"""OpenEnv's routes (its version 0.10): sockets that play episodes, the environment's description, its tools and tasks.

Clients ask for tools and kept sessions by JSON-RPC 2.0 (MCP). Environments without numbered tasks answer the routes of
tasks with 501. OpenEnv's HTTP routes ``/reset`` and ``/step`` are left out: they make a new environment at each
request, so no episode can be played by them, and this server's routes have the same paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import orjson
from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.core.tasks import in_background, run_until_first_ends
from services.environment_server.environments import Tasks, Tool
from services.environment_server.openenv_sessions import OpenEnvError, Session, Sessions, schemas
from services.http.app import version
from services.http.json_body import MAX_DEPTH, JsonResponse, json_depth
from services.http.problems import ProblemError, problem_response
from services.protocol.base import StrictModel

NORMAL_CLOSURE = 1000
"""The close code of a client that is done. uvicorn gives 1005 for a socket that was lost."""
SEND_SECONDS = 30.0
"""Limit of sending one frame: a client that does not read has lost its socket."""


MAX_TASKS = 10_000
"""Most tasks in one reply."""

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
RPC_CODES = {"METHOD_NOT_FOUND": -32601, "INVALID_PARAMS": -32602, "SESSION_ERROR": -32602}
"""JSON-RPC's code for each code of an OpenEnvError; SERVER_ERROR for the others."""
SERVER_ERROR = -32000


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: str
    data: dict[str, Any] | None = None


def add_openenv_routes(app: FastAPI, token: str | None, sessions: Callable[[], Sessions]) -> None:
    """Add OpenEnv's routes to a service; ``sessions`` returns the server's sessions once it is ready."""

    @app.get("/schema", tags=["openenv"])
    async def get_schema() -> dict[str, Any]:
        """Return the JSON schemas of actions, observations and state."""
        return schemas(sessions().table.info)

    @app.get("/metadata", tags=["openenv"])
    async def get_metadata() -> dict[str, Any]:
        """Return the environment's name and the version of this server."""
        info = sessions().table.info
        description = f"{info.id}: states are {info.state.kind}, an action is {info.action.kind}"
        empty = dict.fromkeys(("readme_content", "author", "documentation_url"))
        return {"name": info.id, "description": description, "version": version(), **empty}

    @app.get("/state", tags=["openenv"])
    async def get_state() -> dict[str, Any]:
        """Return the state of a new environment; a session's is asked for at its socket."""
        return {"episode_id": None, "step_count": 0}

    @app.post("/mcp", tags=["openenv"])
    async def post_mcp(request: Request) -> dict[str, Any]:
        """Answer a JSON-RPC request for the environment's tools, or for a session."""
        return await answer_rpc_text(sessions(), await request.body())

    @app.websocket("/mcp")
    async def serve_mcp(socket: WebSocket) -> None:
        async def answer(text: str) -> dict[str, Any]:
            return await answer_rpc_text(sessions(), text)

        if await _accepted(app, socket, token):
            with contextlib.suppress(WebSocketDisconnect, TimeoutError):
                await _talk(socket, answer)

    @app.websocket("/ws")
    async def play(socket: WebSocket) -> None:
        if await _accepted(app, socket, token):
            await _play(socket, sessions())


async def _accepted(app: FastAPI, socket: WebSocket, token: str | None) -> bool:
    """Accept a socket if the service is ready and the client has the token; otherwise refuse with the reason."""
    authorization = socket.headers.get("authorization", "")
    if token is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
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
    except WebSocketDisconnect as disconnect:
        is_over = disconnect.code == NORMAL_CLOSURE
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
                return {"type": "mcp", "data": await answer_rpc(sessions, message.data)}
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


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = Field(default_factory=dict)
    id: Annotated[str | int | None, Field(union_mode="left_to_right")] = None


def parse_json(text: str | bytes) -> Any:
    """Return a parsed frame or body.

    Raises:
        ValueError: it is not JSON, or too deep.
    """
    body = text.encode() if isinstance(text, str) else text
    if (depth := json_depth(body)) > MAX_DEPTH:
        raise ValueError(f"nested {depth} levels deep; allowed are {MAX_DEPTH}")
    return orjson.loads(body)


async def answer_rpc_text(sessions: Sessions, text: str | bytes) -> dict[str, Any]:
    """Return the JSON-RPC response to a request as it came."""
    try:
        data = parse_json(text)
    except ValueError as error:
        return _error(None, PARSE_ERROR, f"Parse error: {error}")
    return await answer_rpc(sessions, data)


async def answer_rpc(sessions: Sessions, data: Any) -> dict[str, Any]:
    """Return the JSON-RPC response to a request for the tools, or to create or close a session."""
    try:
        request = _Request.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        return _error(None, INVALID_REQUEST, f"Invalid request: {'.'.join(map(str, first['loc']))}: {first['msg']}")
    try:
        result = await _result(sessions, request.method, request.params)
    except OpenEnvError as error:
        return _error(request.id, RPC_CODES.get(error.code, SERVER_ERROR), str(error))
    return {"jsonrpc": "2.0", "id": request.id, "result": result}


async def _result(sessions: Sessions, method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "openenv/session/create":
        return {"session_id": sessions.create(is_kept=True).id}
    if method == "openenv/session/close":
        session = sessions.find(params.get("session_id"))
        await sessions.end(session)
        return {"session_id": session.id, "closed": True}
    if "session_id" in params:
        sessions.find(params["session_id"]).touch()
    if method == "tools/list":
        return {
            "tools": [
                {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters}
                for tool in sessions.tools.values()
            ]
        }
    if method == "tools/call":
        name = params.get("name")
        tool = sessions.tools.get(name) if isinstance(name, str) else None
        if tool is None:
            raise OpenEnvError("INVALID_PARAMS", f"Tool not found: {name!r}; there are {sorted(sessions.tools)}")
        return _call(tool, params.get("arguments") or {})
    raise OpenEnvError("METHOD_NOT_FOUND", f"Method not found: {method}")


def _call(tool: Tool, arguments: Any) -> dict[str, Any]:
    """Return the result of a tool. A refusal is a result, too, which the model reads."""
    names = tool.parameters["properties"].keys()
    if not isinstance(arguments, dict) or arguments.keys() != names:
        raise OpenEnvError("INVALID_PARAMS", f"{tool.name} takes the arguments {sorted(names)}")
    is_error = False
    try:
        text = tool.call(**arguments)
    except ValueError as error:
        text, is_error = str(error), True
    return {"content": [{"type": "text", "text": text}], "data": text, "isError": is_error}


def _error(request_id: str | int | None, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message, "data": None}}


class SplitRequest(StrictModel):
    """Body of POST /{env}/tasks and /{env}/num_tasks."""

    split: str


class TaskRequest(SplitRequest):
    """Body of POST /{env}/task."""

    index: int = Field(ge=0)


class TaskRangeRequest(SplitRequest):
    """Body of POST /{env}/task_range: the tasks from ``start`` to ``stop`` (exclusive)."""

    start: int | None = Field(default=None, ge=0)
    stop: int | None = Field(default=None, ge=0)


def add_task_routes(app: FastAPI, sessions: Callable[[], Sessions]) -> None:
    """Add the task routes to a service; ``sessions`` returns the server's sessions once it is ready."""

    @app.get("/list_environments", tags=["openenv tasks"])
    async def get_environments() -> list[str]:
        """Return the name of the environment."""
        return [sessions().table.info.id]

    @app.get("/{environment:path}/splits", tags=["openenv tasks"])
    async def get_splits(environment: str) -> list[dict[str, Any]]:
        """Return the splits."""
        tasks = _tasks(sessions(), environment)
        kinds = ("train", "validation", "test")
        return [{"name": s, "type": s if s in kinds else "validation"} for s in tasks.splits]

    @app.post("/{environment:path}/num_tasks", tags=["openenv tasks"])
    async def post_num_tasks(environment: str, request: SplitRequest) -> dict[str, Any]:
        """Return the number of tasks of a split."""
        return {"num_tasks": _tasks(sessions(), environment).size(request.split)}

    @app.post("/{environment:path}/tasks", tags=["openenv tasks"])
    async def post_tasks(environment: str, request: SplitRequest) -> dict[str, Any]:
        """Return all tasks of a split, without their solutions."""
        tasks = await _describe(_tasks(sessions(), environment), request.split, 0, None)
        return {"tasks": tasks, "env_name": sessions().table.info.id}

    @app.post("/{environment:path}/task_range", tags=["openenv tasks"])
    async def post_task_range(environment: str, request: TaskRangeRequest) -> dict[str, Any]:
        """Return a range of a split's tasks."""
        tasks = _tasks(sessions(), environment)
        return {"tasks": await _describe(tasks, request.split, request.start or 0, request.stop)}

    @app.post("/{environment:path}/task", tags=["openenv tasks"])
    async def post_task(environment: str, request: TaskRequest) -> dict[str, Any]:
        """Return one task."""
        tasks = _tasks(sessions(), environment)
        tasks.maker(request.split, request.index)  # Refuses what there is not.
        return {"task": await in_background(lambda: tasks.describe(request.split, request.index))}


def _tasks(sessions: Sessions, environment: str) -> Tasks:
    """Return the tasks of the environment that a path names.

    Raises:
        ProblemError: 404 for another environment, 501 where it has no tasks.
    """
    name = sessions.table.info.id
    if environment.lower() != name.lower():
        raise ProblemError(404, f"unknown environment {environment[:100]!r}; this server hosts {name!r}")
    if sessions.tasks is None:
        raise ProblemError(501, f"{name!r} has no numbered tasks; a reset's seed chooses the episode")
    return sessions.tasks


async def _describe(tasks: Tasks, split: str, start: int, stop: int | None) -> list[dict[str, Any]]:
    indices = range(tasks.size(split))[start:stop]
    if len(indices) > MAX_TASKS:
        raise ProblemError(400, f"{len(indices)} tasks; ask for {MAX_TASKS} at a time by task_range")
    return await in_background(lambda: [tasks.describe(split, index) for index in indices])
