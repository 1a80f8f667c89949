"""The gateway's sessions: in memory while they are open, and on disk."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally
from typing import Any, Self

import orjson
from prometheus_client import Gauge

from services.chat.tokenizers import import_transformers_alone
from services.core.errors import first_line
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.gateway.calls import Calls
from services.gateway.sessions import Session, refuse
from services.gateway.settings import GatewaySettings
from services.gateway.store import Store
from services.http.problems import ProblemError
from services.protocol.sessions import CreateSessionRequest, RewardRequest, SessionReply, Trace

log = get_logger(__name__)

SESSIONS = Gauge("gateway_sessions_open", "Sessions that take calls.")

_OPEN = "SELECT id FROM sessions WHERE NOT finished ORDER BY created"
_SESSION = "SELECT request, created, finished, reward, reason FROM sessions WHERE id = ?"
_INSERT_SESSION = "INSERT INTO sessions (id, request, created) VALUES (?, ?, ?)"
_SET_REWARD = "UPDATE sessions SET reward = ?, reason = ? WHERE id = ?"
_FINISH = "UPDATE sessions SET finished = 1 WHERE id = ?"
_RECORDS = "SELECT record FROM calls WHERE session = ? ORDER BY number"
_LOST = "SELECT reason, tokens FROM lost WHERE session = ?"
_DELETE = (
    "DELETE FROM sessions WHERE id = ?",
    "DELETE FROM calls WHERE session = ?",
    "DELETE FROM lost WHERE session = ?",
)


class Gateway:
    """All sessions. An async context manager. Open sessions are in memory, finished ones on disk only."""

    calls: Calls

    def __init__(self, settings: GatewaySettings, *, own_process: bool) -> None:
        self.settings = settings
        self._own_process = own_process
        self._store = Store(settings.directory)
        self._sessions: dict[str, Session] = {}
        self._created = int(time.time())
        self._creating = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Load the tokenizer and the open sessions.

        Raises:
            ConfigurationError: the model's tokenizer or configuration, or the sessions' directory, cannot be used.
            DependencyLostError: another process uses the directory.
        """
        self.calls = await in_background(self._load_model)
        await self._store.open()
        for (session_id,) in await self._store.read(_OPEN):
            try:
                session = await self._load(session_id)
            except ProblemError as error:
                log.error("a session is left out", reason=error.detail)
                continue
            assert session is not None
            self._sessions[session_id] = session
        SESSIONS.set(len(self._sessions))
        log.info("loaded", directory=str(self.settings.directory), open_sessions=len(self._sessions))
        return self

    async def __aexit__(self, *_: object) -> None:
        calls = [task for session in self._sessions.values() for task in session.in_flight.values()]
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self.calls.close()
        await self._store.close()

    def _load_model(self) -> Calls:
        if self._own_process:
            import_transformers_alone()
        return Calls(self.settings, self._store)

    async def _load(self, session_id: str) -> Session | None:
        """Return a session as it is on disk; None if there is none.

        Raises:
            ProblemError: 500, what is on disk of it is damaged.
        """
        rows = await self._store.read(_SESSION, session_id)
        if not rows:
            return None
        request, created, finished, reward, reason = rows[0]
        records = await self._store.read(_RECORDS, session_id)
        try:
            asked = CreateSessionRequest.model_validate_json(request)
            session = Session(asked, created, bool(finished), reward, reason)
            for (record,) in records:
                session.tree.restore(orjson.loads(record))
        except (ValueError, TypeError, LookupError) as error:  # among them what orjson and pydantic raise
            detail = f"session {session_id} is damaged in {self.settings.directory}: {first_line(error)}; delete it"
            raise ProblemError(500, detail) from error
        for why, tokens in await self._store.read(_LOST, session_id):
            session.lost[why] += tokens
        return session

    def models(self) -> dict[str, Any]:
        """Return the content of GET /v1/models."""
        model = {
            "id": self.settings.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "gateway",
            "max_model_len": self.calls.context,
        }
        return {"object": "list", "data": [model]}

    def stats(self) -> dict[str, Any]:
        """Return the content of GET /stats."""
        sessions = self._sessions.values()
        lost = sum((session.lost for session in sessions), Tally())
        return {
            "open_sessions": len(sessions),
            "calls_in_flight": sum(len(session.in_flight) for session in sessions),
            "calls": sum(len(session.tree.calls) for session in sessions),
            "sampled_tokens": sum(session.sampled_tokens for session in sessions),
            "lost_tokens": dict(lost),
        }

    async def create(self, request: CreateSessionRequest) -> SessionReply:
        """Open a session.

        Raises:
            ProblemError: 409, another request opened a session of this id.
        """
        async with self._creating:
            session = await self.get(request.id)
            if session is None:
                session = Session(request, time.time())
                await self._store.write((_INSERT_SESSION, (request.id, request.model_dump_json(), session.created)))
                self._sessions[request.id] = session
                SESSIONS.set(len(self._sessions))
        if session.request != request:
            raise ProblemError(409, f"session {request.id} was opened by another request: give each episode its own id")
        return session.reply()

    async def get(self, session_id: str) -> Session | None:
        """Return a session, None if there is none. A finished one is a copy of what is on disk."""
        session = self._sessions.get(session_id) or await self._load(session_id)
        # An open one that is not in memory is being opened or deleted.
        return session if session is None or session.is_finished else self._sessions.get(session_id)

    async def find(self, session_id: str) -> Session:
        """Return a session as ``get`` does.

        Raises:
            ProblemError: 404, there is no such session.
        """
        session = await self.get(session_id)
        if session is None:
            refuse(404, "there is no session of this id; open it by POST /sessions", "unknown_session")
        return session

    async def set_reward(self, session_id: str, request: RewardRequest) -> SessionReply:
        """Set a session's reward.

        Raises:
            ProblemError: 404, unknown session; 409, the session is finished with another reward.
        """
        session = await self.find(session_id)
        async with session.lock:
            if (session.reward, session.reason) != (request.reward, request.reason):
                if session.is_finished:
                    raise ProblemError(409, f"session {session_id} is finished; its reward can no longer change")
                await self._store.write((_SET_REWARD, (request.reward, request.reason, session_id)))
                session.reward, session.reason = request.reward, request.reason
        return session.reply()

    async def finish(self, session_id: str) -> Trace:
        """End a session and return its trace. What its calls in flight sample from now on is lost.

        Raises:
            ProblemError: 404, unknown session.
        """
        session = await self.find(session_id)
        async with session.lock:
            if not session.is_finished:
                await self._store.write((_FINISH, (session_id,)))
                session.is_finished = True
                self._sessions.pop(session_id, None)
                SESSIONS.set(len(self._sessions))
        return session.trace()

    async def delete(self, session_id: str) -> None:
        """Delete a session and everything on disk of it."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            async with session.lock:
                session.is_finished = True
            SESSIONS.set(len(self._sessions))
        await self._store.write(*((statement, (session_id,)) for statement in _DELETE))
