"""OpenEnv's sessions and records (its version 0.10), for its clients of an environment here.

A session plays one episode at a time, and outlives its socket for a while. An action has one field: ``text`` for a
conversation, ``action`` (an index or numbers) for any other environment. An observation has ``messages``, the ones
that came since the last action, or ``state``, numbers.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.clients.play import Episode
from services.core.logs import get_logger
from services.environment_server.catalogue import MakeEnvironment
from services.environment_server.environments import ActionRefusedError, Tasks, Tool
from services.environment_server.episodes import MAX_EPISODES, EpisodeTable
from services.http.problems import ProblemError
from services.protocol.evaluation import (
    Action,
    ActionKind,
    ActionSpec,
    EnvironmentInfo,
    State,
    StateKind,
    StateSpec,
    StepItem,
    StepStatus,
)

log = get_logger(__name__)

GRACE_SECONDS = 60.0
"""The time for which a session that lost its socket is kept, so that its client can attach again."""
IDLE_SECONDS = 300.0
"""A session is ended when its client was silent for this time, because the socket may be half open."""
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
    "required": ["role", "content"],
}


class OpenEnvError(Exception):
    """An error that a frame of type ``error`` reports; ``code`` is one of OpenEnv's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ResetData(BaseModel):
    """The data of a message ``reset``; fields of other environments are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    episode_id: Annotated[str, Field(max_length=255)] | None = None
    split: str | None = None
    index: Annotated[int, Field(ge=0)] | None = None


class Session:
    """A client's session. One that ``is_kept`` ends by a request only, not with its socket."""

    def __init__(self, table: EpisodeTable, tasks: Tasks | None, *, is_kept: bool) -> None:
        self.id = secrets.token_hex(16)
        self.is_kept = is_kept
        self.taken_over: asyncio.Event | None = None
        """Set when another socket attaches to the session; None while it has no socket."""
        self.used = time.monotonic()
        self._table = table
        self._tasks = tasks
        self._lock = asyncio.Lock()
        self._episode: Episode | None = None
        self._episode_id: str | None = None
        """The episode's id as the client knows it, who may choose it."""
        self._last: dict[str, Any] | None = None

    async def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode in place of the session's last one; return its first observation.

        Raises:
            OpenEnvError: the data does not fit, or no episode can be begun.
        """
        try:
            request = ResetData.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            raise OpenEnvError("VALIDATION_ERROR", f"{first['loc'][0]}: {first['msg']}") from error
        info = self._table.info
        if info.seats > 1:
            raise OpenEnvError(
                "VALIDATION_ERROR",
                f"{info.id} has {info.seats} seats, and OpenEnv's sessions have one: play it by POST /reset and /step",
            )
        make = self._make_of(request)
        return await self._finish(self._reset(request, make))

    async def step(self, data: dict[str, Any]) -> dict[str, Any]:
        """Take an action; return the observation after it.

        Raises:
            OpenEnvError: the action does not fit and changed nothing, or the episode is over.
        """
        return await self._finish(self._step(data))

    def touch(self) -> None:
        """Note that the client has sent something."""
        self.used = time.monotonic()

    async def state(self) -> dict[str, Any]:
        """Return the session's state after a step in progress.

        ``last`` has the last observation, for a client that lost its socket before the observation came.
        """
        async with self._lock:
            return {
                "episode_id": self._episode_id,
                "step_count": 0 if self._episode is None else self._episode.steps,
                "session_id": self.id,
                "last": self._last,
            }

    async def end(self) -> None:
        """End the session's episode, after a step in progress."""
        async with self._lock:
            await self._close_episode()

    async def _finish(self, work: Any) -> dict[str, Any]:
        """Return the result of a coroutine that ends even if the client leaves meanwhile."""
        result: dict[str, Any] = await asyncio.shield(asyncio.ensure_future(work))
        self.touch()
        return result

    async def _reset(self, request: ResetData, make: MakeEnvironment | None) -> dict[str, Any]:
        async with self._lock:
            await self._close_episode()
            try:
                reply = await self._table.reset(1, request.seed, make)
            except ProblemError as error:
                code = "CAPACITY_REACHED" if error.status_code == 429 else "EXECUTION_ERROR"
                raise OpenEnvError(code, error.detail) from error
            [start] = reply.episodes
            self._episode = Episode.begun(start, reply.environment)
            self._episode_id = request.episode_id or start.episode
            return self._observe(self._episode, None, None)

    async def _step(self, data: dict[str, Any]) -> dict[str, Any]:
        async with self._lock:
            episode = self._episode
            if episode is None:
                raise OpenEnvError("EXECUTION_ERROR", "no episode has begun; send reset first")
            try:
                action = decode_action(self._table.info.action, data)
            except ActionRefusedError as error:
                raise OpenEnvError("VALIDATION_ERROR", str(error)) from error
            item = StepItem.model_construct(episode=episode.id, step=episode.steps, action=action)
            [result] = await self._table.step([item])
            if result.status is StepStatus.REFUSED:
                is_over = episode.id not in self._table.active
                code = "EXECUTION_ERROR" if is_over else "VALIDATION_ERROR"
                raise OpenEnvError(code, f"{result.detail}; send reset" if is_over else str(result.detail))
            if result.status is StepStatus.LOST:
                raise OpenEnvError("EXECUTION_ERROR", f"the episode is lost: {result.detail}")
            before = episode.state
            episode.follow(result)
            return self._observe(episode, before, result.reward)

    def _observe(self, episode: Episode, before: State | None, reward: float | None) -> dict[str, Any]:
        """Return the observation of the episode's state, and keep it; ``before`` is the state before it, if any."""
        metadata = {
            "session_id": self.id,
            "episode_id": self._episode_id,
            "step_count": episode.steps,
            "truncated": episode.status is StepStatus.TRUNCATED,
        }
        self._last = {
            "observation": encode_observation(self._table.info.state, before, episode.state),
            "reward": reward,
            "done": episode.has_ended,
            "metadata": metadata,
        }
        return self._last

    async def _close_episode(self) -> None:
        if self._episode is not None:
            await self._table.close([self._episode.id])
        self._episode = self._episode_id = self._last = None

    def _make_of(self, request: ResetData) -> MakeEnvironment | None:
        """Return the maker of the task that a reset names; None where it names none."""
        if request.split is None and request.index is None:
            return None
        if self._tasks is None:
            raise OpenEnvError("VALIDATION_ERROR", f"{self._table.info.id} has no tasks; leave out split and index")
        try:
            return self._tasks.maker(request.split, request.index)
        except ProblemError as error:
            raise OpenEnvError("VALIDATION_ERROR", error.detail) from error


class Sessions:
    """All OpenEnv sessions of a server. ``tasks`` and ``tools`` are the environment's, where it has any."""

    def __init__(self, table: EpisodeTable, tasks: Tasks | None, tools: tuple[Tool, ...]) -> None:
        self.table = table
        self.tasks = tasks
        self.tools = {tool.name: tool for tool in tools}
        self._all: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._all)

    def create(self, *, is_kept: bool = False) -> Session:
        """Add a session.

        Raises:
            OpenEnvError: there are too many.
        """
        if len(self._all) >= MAX_EPISODES:
            raise OpenEnvError(
                "CAPACITY_REACHED", f"{len(self._all)} sessions are held; end some, or ask another server"
            )
        session = Session(self.table, self.tasks, is_kept=is_kept)
        self._all[session.id] = session
        return session

    def attach(self, session_id: str | None) -> tuple[Session, asyncio.Event]:
        """Return a session for a new socket, and an event that is set when yet another socket takes the session.

        Without ``session_id`` the session is new. The newest socket wins, because an older one may be half open.

        Raises:
            OpenEnvError: the session does not exist, or there are too many.
        """
        session = self.create() if session_id is None else self.find(session_id)
        if session.taken_over is not None:
            session.taken_over.set()
        session.taken_over = asyncio.Event()
        session.used = time.monotonic()
        return session, session.taken_over

    def find(self, session_id: Any) -> Session:
        """Return a session.

        Raises:
            OpenEnvError: no session has that id.
        """
        session = self._all.get(session_id) if isinstance(session_id, str) else None
        if session is None:
            raise OpenEnvError(
                "SESSION_ERROR", f"Unknown session_id: {str(session_id)[:60]}; it ended, or the server was restarted"
            )
        return session

    async def detach(self, session: Session, event: asyncio.Event, *, is_over: bool) -> None:
        """Note that a socket has left; end the session if the client is done with it."""
        if session.taken_over is not event:
            return
        session.taken_over = None
        session.used = time.monotonic()
        if is_over and not session.is_kept:
            await self.end(session)

    async def end(self, session: Session) -> None:
        """End a session and its episode, and send its socket away."""
        if self._all.pop(session.id, None) is not None:
            if session.taken_over is not None:
                session.taken_over.set()
            await session.end()

    async def sweep(self) -> None:
        """End the sessions that lost their socket GRACE_SECONDS ago or are silent for IDLE_SECONDS."""
        now = time.monotonic()
        for session in list(self._all.values()):
            is_away = session.taken_over is None and not session.is_kept
            if now - session.used > (GRACE_SECONDS if is_away else IDLE_SECONDS):
                log.warning(
                    "ended an OpenEnv session", reason="its socket was lost" if is_away else "its client is silent"
                )
                await self.end(session)


def schemas(info: EnvironmentInfo) -> dict[str, Any]:
    """Return the JSON schemas of ``action``, ``observation`` and ``state``, the reply of GET /schema."""
    field, schema = _field(info.action.kind), _action_value(info.action)
    observation = _observation_value(info.state)
    return {
        "action": _object("EnvironmentAction", {field: schema, "metadata": {"type": "object"}}, [field]),
        "observation": _object("EnvironmentObservation", observation, list(observation)),
        "state": _object(
            "EnvironmentState",
            {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer", "minimum": 0}},
            ["step_count"],
        ),
    }


def decode_action(spec: ActionSpec, data: dict[str, Any]) -> Action:
    """Return the action of a step.

    A number, list or object in the place of text becomes its JSON, because clients parse a model's answer "42" first.

    Raises:
        ActionRefusedError: the field is missing, or there are others.
    """
    field = _field(spec.kind)
    if field not in data or data.keys() - {field, "metadata"}:
        raise ActionRefusedError(f"the action has the fields {sorted(data)[:10]}; it must have {field!r} alone")
    value = data[field]
    if spec.kind is ActionKind.TEXT and not isinstance(value, str):
        return orjson.dumps(value).decode()
    action: Action = value
    return action


def encode_observation(spec: StateSpec, before: State | None, state: State) -> dict[str, Any]:
    """Return the observation of ``state``; ``before`` is the state that the last action was for."""
    if spec.kind is StateKind.NUMBERS:
        return {"state": state}
    assert isinstance(state, list)
    if not isinstance(before, list) or state[: len(before)] != before:
        return {"messages": state}
    added = state[len(before) :]
    # The first message that was added is the action itself.
    return {"messages": added[1:] if added and added[0].get("role") == "assistant" else added}


def _field(kind: ActionKind) -> str:
    return "text" if kind is ActionKind.TEXT else "action"


def _action_value(spec: ActionSpec) -> dict[str, Any]:
    if spec.kind is ActionKind.TEXT:
        return {"type": "string"}
    if spec.kind is ActionKind.INDEX:
        assert spec.count is not None
        return {"type": "integer", "minimum": spec.start, "maximum": spec.start + spec.count - 1}
    return numbers_schema(spec.shape)


def _observation_value(spec: StateSpec) -> dict[str, Any]:
    if spec.kind is StateKind.NUMBERS:
        return {"state": numbers_schema(spec.shape)}
    return {"messages": {"type": "array", "items": _MESSAGE}}


def numbers_schema(shape: list[int]) -> dict[str, Any]:
    """Return the JSON schema of nested lists of numbers."""
    schema: dict[str, Any] = {"type": "number"}
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema


def _object(title: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "title": title, "properties": properties, "required": required}
