"""The gateway's sessions: in memory while they are open, and on disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Self

import orjson
from prometheus_client import Counter, Gauge

from services.chat.tokenizers import import_transformers_alone
from services.core.endpoints import num_nodes
from services.core.errors import first_line
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.gateway.calls import Calls
from services.gateway.sessions import Session
from services.gateway.settings import GatewaySettings
from services.gateway.store import TRACED_TOKENS, Store
from services.http.problems import ProblemError, refuse
from services.protocol import sessions as wire

log = get_logger(__name__)

SESSIONS = Gauge("gateway_sessions_open", "Sessions that take calls.")
EXPIRED = Counter("gateway_sessions_expired", "Sessions removed because nobody did so until long after their deadline.")

EXPIRY_SECONDS = 60.0
GRACE_SECONDS = 3600.0
"""A session is removed this long after its deadline. Its owner needs less to finish and to delete it, also when one of
them is restarted in between."""

_OPEN = "SELECT id FROM sessions WHERE NOT finished ORDER BY created"
_SESSION = "SELECT request, created, finished, reward, reason, refused FROM sessions WHERE id = ?"
_INSERT_SESSION = "INSERT INTO sessions (id, request, created) VALUES (?, ?, ?)"
_SET_REWARD = "UPDATE sessions SET reward = ?, reason = ? WHERE id = ?"
_FINISH = "UPDATE sessions SET finished = 1, reward = ?, reason = ?, refused = ? WHERE id = ?"
_RECORDS = "SELECT record FROM calls WHERE session = ? ORDER BY number"
_LOST = "SELECT reason, tokens FROM lost WHERE session = ?"
# A session whose request is damaged stays until its owner deletes it.
_LATE = (
    "SELECT id FROM sessions "
    "WHERE CASE WHEN json_valid(request) THEN created + json_extract(request, '$.deadline_seconds') < ? END"
)
_DELETE = (
    "DELETE FROM sessions WHERE id = ?",
    "DELETE FROM calls WHERE session = ?",
    "DELETE FROM lost WHERE session = ?",
)


class Gateway:
    """All sessions. An async context manager. Open sessions are in memory, finished ones on disk only."""

    calls: Calls

    def __init__(self, settings: GatewaySettings, on_damage: Callable[[Exception], None], *, own_process: bool) -> None:
        """Make the gateway; ``on_damage`` gets the error that must end the process, once the database is damaged."""
        self.settings = settings
        self._own_process = own_process
        self._store = Store(settings.directory, on_damage)
        self._sessions: dict[str, Session] = {}
        self._created = int(time.time())
        self._creating = asyncio.Lock()
        SESSIONS.set_function(lambda: len(self._sessions))

    async def __aenter__(self) -> Self:
        """Load the tokenizer and the open sessions.

        Raises:
            ConfigurationError: the model's tokenizer or configuration, or the sessions' directory, cannot be used, or
                the database is damaged.
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
        self._expiring = asyncio.create_task(self._expire_late_ones())
        log.info("loaded", directory=str(self.settings.directory), open_sessions=len(self._sessions))
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for session in self._sessions.values() for task in session.in_flight.values()]
        for task in (self._expiring, *tasks):
            task.cancel()
        await asyncio.gather(self._expiring, *tasks, return_exceptions=True)
        await self.calls.close()
        await self._store.close()

    def _load_model(self) -> Calls:
        if self._own_process:
            import_transformers_alone()
        return Calls(self.settings, self._store)

    async def _load(self, session_id: str) -> Session | None:
        """Return the session of an id from the disk; None for an unknown id.

        Raises:
            ProblemError: 500, its rows are damaged.
        """
        rows = await self._store.read(_SESSION, session_id)
        if not rows:
            return None
        request, created, finished, reward, reason, refused = rows[0]
        records = await self._store.read(_RECORDS, session_id)
        try:
            opened = wire.CreateSessionRequest.model_validate_json(request)
            session = Session(opened, created, bool(finished), reward, reason, refused=refused)
            for (record,) in records:
                session.restore(orjson.loads(record))
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
        return wire.GatewayStats(
            open_sessions=len(sessions),
            calls_in_flight=sum(len(session.in_flight) for session in sessions),
            engine_tokens=self._store.engine_tokens,
            trace_tokens=self._store.trace_tokens,
            open_tokens=sum(session.sampled_tokens for session in sessions),
            lost_tokens=dict(self._store.lost),
            nodes=num_nodes(),
        ).model_dump()

    async def create(self, request: wire.CreateSessionRequest) -> wire.SessionReply:
        """Open a session. Delete open sessions with the same request but another id: their owner must have died.

        Raises:
            ProblemError: 409, another request opened a session of this id.
        """
        async with self._creating:
            session = await self.get(request.id)
            if session is None:
                for other in self._abandoned(request):
                    log.info("session abandoned", session=other, successor=request.id)
                    await self.delete(other, "abandoned")
                session = Session(request, time.time())
                await self._store.write((_INSERT_SESSION, (request.id, request.model_dump_json(), session.created)))
                self._sessions[request.id] = session
        if session.request != request:
            raise ProblemError(409, f"session {request.id} was opened by another request: give each episode its own id")
        return session.reply()

    def _abandoned(self, request: wire.CreateSessionRequest) -> list[str]:
        """Return the open sessions of the same episode, with the same seed, as ``request`` begins."""
        if not request.group_id or request.seed is None:
            return []
        place = (request.group_id, request.index, request.seed)
        requests = (s.request for s in self._sessions.values())
        same = (r for r in requests if (r.group_id, r.index, r.seed) == place)
        return [other.id for other in same if other.model_copy(update={"id": request.id}) == request]

    async def get(self, session_id: str) -> Session | None:
        """Return the session of an id, None for an unknown id. A finished one is a copy of that on disk."""
        session = self._sessions.get(session_id) or await self._load(session_id)
        # An open one that is not in memory is being opened or deleted.
        return session if session is None or session.is_finished else self._sessions.get(session_id)

    async def find(self, session_id: str) -> Session:
        """Return a session as ``get`` does.

        Raises:
            ProblemError: 404, unknown session.
        """
        session = await self.get(session_id)
        if session is None:
            refuse(404, "there is no session of this id; open it by POST /sessions", "unknown_session")
        return session

    async def set_reward(self, session_id: str, request: wire.RewardRequest) -> wire.SessionReply:
        """Set a session's reward.

        Raises:
            ProblemError: 404, unknown session; 409, the session is finished with another reward.
        """
        session = await self.find(session_id)
        async with session.lock:
            session.check_reward(request)
            if not session.is_finished:
                await self._store.write((_SET_REWARD, (request.reward, request.reason, session_id)))
                session.reward, session.reason = request.reward, request.reason
        return session.reply()

    async def finish(self, session_id: str, request: wire.FinishRequest | None = None) -> wire.Trace:
        """End a session and return its trace. What its calls in flight sample from now on is lost.

        The request sets the reward, unless POST /reward has set it, and deletes the sessions whose traces have arrived.

        Raises:
            ProblemError: 404, unknown session; 409, the session is finished with another reward.
        """
        session = await self.find(session_id)
        async with session.lock:
            if request is None:
                request = wire.FinishRequest(reward=session.reward, reason=session.reason)
            session.check_reward(request)
            # All open sessions are in memory.
            received = [other for other in request.received if other not in self._sessions]
            deletions = [(statement, (other,)) for other in received for statement in _DELETE]
            if session.is_finished:
                await self._store.write(*deletions)
            else:
                finish = (_FINISH, (request.reward, request.reason, session.refused, session_id))
                await self._store.enter(TRACED_TOKENS, session.sampled_tokens, finish, *deletions)
                session.reward, session.reason, session.is_finished = request.reward, request.reason, True
                self._sessions.pop(session_id, None)
        return session.trace()

    async def delete(self, session_id: str, reason: str = "deleted") -> None:
        """Delete a session and everything on disk of it; ``reason`` is that of losing the tokens of an open one."""
        statements = [(statement, (session_id,)) for statement in _DELETE]
        session = self._sessions.get(session_id)
        if session is None:
            await self._store.write(*statements)
            return
        async with session.lock:
            lost = 0 if session.is_finished else session.sampled_tokens
            await self._store.lose(reason, lost, *statements)
            session.is_finished = True
            self._sessions.pop(session_id, None)

    async def expire(self, now: float) -> None:
        """Delete the sessions whose deadline was more than GRACE_SECONDS before ``now``, in Unix seconds."""
        for (session_id,) in await self._store.read(_LATE, now - GRACE_SECONDS):
            log.info("session expired", session=session_id)
            await self.delete(session_id, "expired")
            EXPIRED.inc()

    async def _expire_late_ones(self) -> None:
        while True:
            try:
                await self.expire(time.time())
            # Whatever the database or a damaged session raises, a later try may succeed.
            except Exception as error:  # noqa: BLE001
                log.warning("sessions not expired", reason=first_line(error))
            await asyncio.sleep(EXPIRY_SECONDS)
