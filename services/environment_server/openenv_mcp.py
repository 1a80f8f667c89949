"""OpenEnv's MCP requests: JSON-RPC 2.0 for an environment's tools, and for sessions that outlive one socket."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.environment_server.environments import Tool
from services.environment_server.openenv_sessions import Sessions
from services.environment_server.openenv_wire import OpenEnvError
from services.http.json_body import MAX_DEPTH, json_depth

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
SERVER_ERROR = -32000


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = Field(default_factory=dict)
    id: Annotated[str | int | None, Field(union_mode="left_to_right")] = None


class _RpcError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse_json(text: str | bytes) -> Any:
    """Return a parsed frame or body.

    Raises:
        ValueError: it is not JSON, or too deep.
    """
    body = text.encode() if isinstance(text, str) else text
    if (depth := json_depth(body)) > MAX_DEPTH:
        raise ValueError(f"nested {depth} levels deep; allowed are {MAX_DEPTH}")
    return orjson.loads(body)


async def answer_text(sessions: Sessions, text: str | bytes) -> dict[str, Any]:
    """Return the JSON-RPC response to a request as it came."""
    try:
        data = parse_json(text)
    except ValueError as error:
        return _error(None, PARSE_ERROR, f"Parse error: {error}")
    return await answer(sessions, data)


async def answer(sessions: Sessions, data: Any) -> dict[str, Any]:
    """Return the JSON-RPC response to a request for the tools, or to create or close a session."""
    try:
        request = _Request.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        return _error(None, INVALID_REQUEST, f"Invalid request: {'.'.join(map(str, first['loc']))}: {first['msg']}")
    try:
        result = await _result(sessions, request.method, request.params)
    except _RpcError as error:
        return _error(request.id, error.code, str(error))
    except OpenEnvError as error:
        return _error(request.id, INVALID_PARAMS if error.code == "SESSION_ERROR" else SERVER_ERROR, str(error))
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
            raise _RpcError(INVALID_PARAMS, f"Tool not found: {name!r}; there are {sorted(sessions.tools)}")
        return _call(tool, params.get("arguments") or {})
    raise _RpcError(METHOD_NOT_FOUND, f"Method not found: {method}")


def _call(tool: Tool, arguments: Any) -> dict[str, Any]:
    """Return the result of a tool; its refusal is a result, too, which the model reads."""
    names = tool.parameters["properties"].keys()
    if not isinstance(arguments, dict) or arguments.keys() != names:
        raise _RpcError(INVALID_PARAMS, f"{tool.name} takes the arguments {sorted(names)}")
    is_error = False
    try:
        text = tool.call(**arguments)
    except ValueError as error:
        text, is_error = str(error), True
    return {"content": [{"type": "text", "text": text}], "data": text, "isError": is_error}


def _error(request_id: str | int | None, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message, "data": None}}
