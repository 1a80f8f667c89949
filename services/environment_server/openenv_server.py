"""OpenEnv's wire (its version 0.10) on this server: a socket that plays episodes, and the environment's schemas.

An action has one field: ``text`` for a conversation, ``action`` (an index or numbers) for any other environment. An
observation has ``messages``, the ones that came since the last action, or ``state``, numbers. OpenEnv's HTTP routes
``/reset`` and ``/step`` are left out: they make a new environment at each request, so no episode can be played by them,
and this server's routes have the same paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.clients.play import Episode
from services.environment_server.environments import ActionRefusedError, Tasks
from services.environment_server.episodes import EpisodeTable
from services.http.app import version
from services.http.json_body import MAX_DEPTH, JsonResponse, json_depth
from services.http.problems import ProblemError, problem_response
from services.protocol import evaluation as wire
from services.protocol.base import StrictModel

SEND_SECONDS = 30.0
"""Limit of sending one frame: a client that does not read has lost its socket."""
TYPES = ("reset", "step", "state", "close")
"""The messages of a client. Tools by OpenEnv's ``mcp`` are not offered: an environment's rules name what it takes."""
CODES = {400: "VALIDATION_ERROR", 429: "CAPACITY_REACHED"}
"""OpenEnv's code of an error by its HTTP status; EXECUTION_ERROR for any other status."""


class ResetData(BaseModel):
    """The data of a message ``reset``; fields of other environments are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    episode_id: Annotated[str, Field(max_length=255)] | None = None
    split: str | None = None
    index: Annotated[int, Field(ge=0)] | None = None


class Message(StrictModel):
    """A frame of a client."""

    type: str
    data: dict[str, Any] = Field(default_factory=dict)


class Session:
    """The episodes of one socket, one at a time."""

    def __init__(self, table: EpisodeTable) -> None:
        self._table = table
        self._episode: Episode | None = None
        self._episode_id: str | None = None
        """The episode's id as the client knows it, who may choose it."""

    async def answer(self, text: str) -> dict[str, Any] | None:
        """Return the frame that answers a frame; None after a message ``close``."""
        try:
            if json_depth(text.encode()) > MAX_DEPTH:
                return _error_frame("INVALID_JSON", f"Invalid JSON: nested more than {MAX_DEPTH} levels deep")
            message = Message.model_validate(orjson.loads(text))
            if message.type == "close":
                return None
            return await self._answer(message)
        except ProblemError as error:
            return _error_frame(CODES.get(error.status_code, "EXECUTION_ERROR"), error.detail)
        except (ActionRefusedError, ValidationError) as error:
            return _error_frame("VALIDATION_ERROR", str(error))
        except orjson.JSONDecodeError as error:
            return _error_frame("INVALID_JSON", f"Invalid JSON: {error}")

    async def close(self) -> None:
        """End the episode."""
        if self._episode is not None:
            await self._table.close([self._episode.id])
        self._episode = self._episode_id = None

    async def _answer(self, message: Message) -> dict[str, Any]:
        match message.type:
            case "reset":
                return {"type": "observation", "data": await self._reset(ResetData.model_validate(message.data))}
            case "step":
                return {"type": "observation", "data": await self._step(message.data)}
            case "state":
                steps = 0 if self._episode is None else self._episode.steps
                return {"type": "state", "data": {"episode_id": self._episode_id, "step_count": steps}}
        return _error_frame("UNKNOWN_TYPE", f"Unknown message type: {message.type[:60]}; send {', '.join(TYPES)}")

    async def _reset(self, request: ResetData) -> dict[str, Any]:
        """Begin an episode in place of the last one, and return its first observation."""
        info, tasks, hosted = self._table.info, self._table.make, None
        if info.seats > 1:
            raise ProblemError(400, f"{info.id} has {info.seats} seats, and OpenEnv's sessions one; use POST /reset")
        if request.split is not None or request.index is not None:
            if not isinstance(tasks, Tasks):
                raise ProblemError(400, f"{info.id} has no tasks; leave out split and index")
            hosted = tasks.maker(request.split, request.index), info
        await self.close()
        reply = await self._table.reset(1, request.seed, hosted)
        self._episode = Episode.begun(reply.episodes[0], reply.environment)
        self._episode_id = request.episode_id or self._episode.id
        return self._observe(self._episode, None, None)

    async def _step(self, data: dict[str, Any]) -> dict[str, Any]:
        """Take an action, and return the observation after it; an action that does not fit changes nothing."""
        episode, table = self._episode, self._table
        if episode is None:
            raise ProblemError(409, "no episode has begun; send reset first")
        [result] = await table.step([episode.step_with(_decode_action(table.info.action, data))])
        if not result.is_taken:
            goes_on = result.status is wire.StepStatus.REFUSED and episode.id in table.active
            raise ProblemError(400 if goes_on else 409, f"{result.detail}{'' if goes_on else '; send reset'}")
        before = episode.state
        episode.follow(result)
        return self._observe(episode, before, result.reward)

    def _observe(self, episode: Episode, before: wire.State | None, reward: float | None) -> dict[str, Any]:
        """Return the observation of the episode's state; ``before`` is the state before it, if any."""
        is_truncated = episode.status is wire.StepStatus.TRUNCATED
        counts = {"episode_id": self._episode_id, "step_count": episode.steps, "truncated": is_truncated}
        observation: dict[str, Any] = {"state": episode.state}
        if self._table.info.state.kind is wire.StateKind.MESSAGES:
            assert isinstance(episode.state, list)
            added = episode.state
            if isinstance(before, list) and added[: len(before)] == before:
                added = added[len(before) :]
                # The first message that was added is the action itself.
                added = added[1:] if added and added[0].get("role") == "assistant" else added
            observation = {"messages": added}
        return {"observation": observation, "reward": reward, "done": episode.has_ended, "metadata": counts}


def add_openenv_routes(app: FastAPI, token: str | None, table: Callable[[], EpisodeTable]) -> None:
    """Add OpenEnv's routes to a service; ``table`` returns the server's episodes once it is ready."""

    @app.get("/schema", tags=["openenv"])
    async def get_schema() -> dict[str, Any]:
        """Return the JSON schemas of actions, observations and state."""
        return schemas(table().info)

    @app.get("/metadata", tags=["openenv"])
    async def get_metadata() -> dict[str, Any]:
        """Return the environment's name and the version of this server."""
        info = table().info
        about = f"{info.id}: states are {info.state.kind}, an action is {info.action.kind}"
        return {"name": info.id, "description": about, "version": version()}

    @app.websocket("/ws")
    async def play(socket: WebSocket) -> None:
        refusal = None
        authorization = socket.headers.get("authorization", "")
        if token is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            refusal = problem_response(401, "JOBGROUP_TOKEN is set here: send it as 'Authorization: Bearer <token>'")
        elif not app.state.lifecycle.is_serving:
            refusal = problem_response(503, "the server is starting or stopping; wait until GET /health answers 200")
        if refusal is not None:
            await socket.send_denial_response(refusal)
            return
        await socket.accept()
        await _play(socket, table())


async def _play(socket: WebSocket, table: EpisodeTable) -> None:
    """Answer the frames of a client until it leaves, closes its session, or reads no more."""
    session = Session(table)
    table.sockets += 1
    try:
        with contextlib.suppress(WebSocketDisconnect, TimeoutError):
            while (frame := await session.answer(await socket.receive_text())) is not None:
                async with asyncio.timeout(SEND_SECONDS):
                    await socket.send_text(bytes(JsonResponse(frame).body).decode())
            await socket.close()
    finally:
        table.sockets -= 1
        await asyncio.shield(session.close())


def _error_frame(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


def schemas(info: wire.EnvironmentInfo) -> dict[str, Any]:
    """Return the JSON schemas of ``action``, ``observation`` and ``state``, the reply of GET /schema."""
    role_and_content = {"role": {"type": "string"}, "content": {"type": "string"}}
    message = {"type": "object", "properties": role_and_content, "required": [*role_and_content]}
    observation = {"messages": {"type": "array", "items": message}}
    if info.state.kind is wire.StateKind.NUMBERS:
        observation = {"state": numbers_schema(info.state.shape)}
    field, value = _action_form(info.action)
    forms = {
        "action": ({field: value, "metadata": {"type": "object"}}, [field]),
        "observation": (observation, [*observation]),
        "state": ({"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}}, ["step_count"]),
    }
    return {
        name: {"type": "object", "title": f"Environment{name.title()}", "properties": fields, "required": required}
        for name, (fields, required) in forms.items()
    }


def _decode_action(spec: wire.ActionSpec, data: dict[str, Any]) -> wire.Action:
    """Return the action of a step, or raise ActionRefusedError where its field is missing or has others beside it.

    A number, list or object in the place of text becomes its JSON, because clients parse a model's answer "42" first.
    """
    field, _ = _action_form(spec)
    if field not in data or data.keys() - {field, "metadata"}:
        raise ActionRefusedError(f"the action has the fields {sorted(data)[:10]}; it must have {field!r} alone")
    value: wire.Action = data[field]
    is_parsed = spec.kind is wire.ActionKind.TEXT and not isinstance(value, str)
    return orjson.dumps(value).decode() if is_parsed else value


def _action_form(spec: wire.ActionSpec) -> tuple[str, dict[str, Any]]:
    """Return the only field of an action, and its JSON schema."""
    if spec.kind is wire.ActionKind.TEXT:
        return "text", {"type": "string"}
    if spec.kind is wire.ActionKind.NUMBERS:
        return "action", numbers_schema(spec.shape)
    assert spec.count is not None
    return "action", {"type": "integer", "minimum": spec.start, "maximum": spec.start + spec.count - 1}


def numbers_schema(shape: list[int]) -> dict[str, Any]:
    """Return the JSON schema of nested lists of numbers."""
    schema: dict[str, Any] = {"type": "number"}
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema
