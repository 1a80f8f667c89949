"""The tools that agents call at their session's URL: programs in a box of the session, on an environment-server.

The box is an episode of ENVIRONMENT=sandbox whose actions are the calls. A call is on disk before it is sent, and its
result before it is answered. So a request that repeats a call gets its result, and a call without a result is sent
again after a crash of the gateway, as the same step of the episode, which an environment-server takes once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from services.clients.environment import EnvironmentClient, ServedEpisode
from services.core.errors import ConfigurationError, DependencyLostError
from services.gateway.sessions import Session
from services.gateway.store import Store
from services.http.client import RequestRefusedError
from services.http.problems import ProblemError, refuse
from services.protocol.chat import BOX, ToolCall
from services.protocol.evaluation import EpisodeStart, ResetReply, StepResult, StepStatus

BEGIN_SECONDS = 60.0
"""The time that environment-servers may take to begin a box."""
_READ = "SELECT call, action, reply FROM tools WHERE session = ? ORDER BY number"
_INSERT = "INSERT INTO tools (session, call, action, reply) VALUES (?, ?, ?, ?)"
_UPDATE = "UPDATE tools SET reply = ? WHERE session = ? AND call = ?"
_BEGUN = ""
"""The call of a session's first row, whose action is the URL of the server, and whose reply is that of the reset."""

T = TypeVar("T")


@dataclass
class _Held:
    """The box of a session, and the results of its calls by their id."""

    episode: ServedEpisode | None = None
    results: dict[str, StepResult] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a call is answered."""


class Tools:
    """The boxes of all sessions."""

    def __init__(self, store: Store, token: str | None) -> None:
        self._store = store
        self._environments = EnvironmentClient(token=token, deadline=BEGIN_SECONDS)
        self._held: dict[str, _Held] = {}
        self._working: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """End calls under way, and close the connections; the boxes stay."""
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        await self._environments.__aexit__(None, None, None)

    async def call(self, session: Session, body: dict[str, Any]) -> dict[str, Any]:
        """Return the message with the result of a tool call; the same for a repeated call.

        Raises:
            ProblemError: 400, ``body`` is no tool call, or no environment-server has boxes; 409, the session is
                finished; 500, the box is lost; 503, no environment-server answers.
        """
        try:
            call = ToolCall.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            refuse(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}; send a tool call as it came", "no_call")
        session.check_open()
        if session.seconds_left <= 0:
            session.refuse_late()
        with session.waits.running():
            # The call continues when its client disconnects.
            result = await asyncio.shield(self._work(self._call(session.id, call)))
        if result.status is StepStatus.LOST:
            raise ProblemError(500, f"the box of session {session.id} is lost: {result.detail}")
        content = result.state[-1]["content"] if isinstance(result.state, list) else f"[{result.detail}]"
        return {"role": "tool", "tool_call_id": call.id, "content": content}

    def release(self, session_id: str) -> None:
        """End the box of a session, if it has one; nothing waits for that."""
        held = self._held.pop(session_id, None)
        if held is not None and held.episode is not None:
            self._work(self._environments.end(held.episode))

    def _work(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return task

    async def _call(self, session_id: str, call: ToolCall) -> StepResult:
        held = self._held.setdefault(session_id, _Held())
        async with held.lock:
            if held.episode is None:
                held.episode = await self._open(session_id, held)
            if call.id not in held.results:
                action = f"<tool_call>{call.function.model_dump_json()}</tool_call>"
                await self._store.write((_INSERT, (session_id, call.id, action, None)))
                held.results[call.id] = await self._step(session_id, held.episode, call.id, action)
            return held.results[call.id]

    async def _step(self, session_id: str, episode: ServedEpisode, call_id: str, action: str) -> StepResult:
        result = await self._environments.step(episode, action)
        await self._store.write((_UPDATE, (result.model_dump_json(), session_id, call_id)))
        if result.is_taken:
            episode.follow(result)
        return result

    async def _open(self, session_id: str, held: _Held) -> ServedEpisode:
        """Return the episode on disk with the results of its calls, or a new one."""
        rows = await self._store.read(_READ, session_id)
        if not rows:
            return await self._begin(session_id)
        (_, url, begun), *calls = rows
        reply = ResetReply.model_validate_json(begun)
        episode = ServedEpisode.begun_at(await self._environments.connect(url), reply, BOX)
        for call_id, action, text in calls:
            if text is None:
                held.results[call_id] = await self._step(session_id, episode, call_id, action)
                continue
            result = held.results[call_id] = StepResult.model_validate_json(text)
            if result.is_taken:
                episode.remember(action, result)
                episode.follow(result)
        return episode

    async def _begin(self, session_id: str) -> ServedEpisode:
        try:
            episode = await self._environments.begin(0, BOX)
        except (ConfigurationError, RequestRefusedError) as error:
            refuse(400, f"no environment-server runs tools: {error}", "no_tools")
        except DependencyLostError as error:
            raise ProblemError(503, f"no box can be begun: {error}", {"Retry-After": "5"}) from error
        if (name := episode.environment.id) != "sandbox":
            await self._environments.end(episode)
            refuse(400, f"the environment-servers host {name}, which has no boxes; set ENVIRONMENT=sandbox", "no_tools")
        start = EpisodeStart(episode=episode.id, seed=episode.seed, state=episode.state)
        reply = ResetReply(environment=episode.environment, episodes=[start])
        begun = (session_id, _BEGUN, episode.server.url, reply.model_dump_json())
        await self._store.write((_INSERT, begun))
        return episode
