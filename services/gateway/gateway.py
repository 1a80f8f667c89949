"""The gateway: sessions kept on disk, and calls answered by the engines."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally
from collections.abc import Sequence
from typing import Any, Self

import orjson
from prometheus_client import Counter, Gauge

from services.chat.tokenizers import import_transformers_alone, load_tokenizer
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.core.seeds import derive_seed
from services.core.tasks import in_background
from services.core.vocabulary import context_length, vocabulary_size
from services.gateway.engine import EngineClient
from services.gateway.prompts import PromptMaker
from services.gateway.replies import add_turns, reply_of
from services.gateway.requests import ChatRequest
from services.gateway.sessions import Session, refuse
from services.gateway.settings import GatewaySettings
from services.gateway.store import Store
from services.gateway.tree import Call
from services.http.client import RequestRefusedError
from services.http.problems import ProblemError
from services.protocol.groups import Completion
from services.protocol.sessions import CreateSessionRequest, RewardRequest, SessionReply, Trace

log = get_logger(__name__)

CALLS = Counter("gateway_calls", "Calls answered with newly sampled turns.")
REPEATED = Counter("gateway_calls_repeated", "Calls answered with the reply that was given before.")
REFUSED = Counter("gateway_calls_refused", "Calls refused because a session's limit was reached, by limit.", ["limit"])
SAMPLED = Counter("gateway_sampled_tokens", "Sampled tokens recorded in sessions.")
LOST = Counter("gateway_lost_tokens", "Sampled tokens that no session has, by reason.", ["reason"])
TOOL_CALLS = Counter("gateway_tool_calls", "Tool calls that models wrote, by whether they could be parsed.", ["parsed"])
BRANCHES = Counter("gateway_branches", "Calls at a place of a conversation where another call was before.")
BROKEN = Counter("gateway_broken_prefixes", "Calls rendered whole, since the template changes a turn later on.")
SESSIONS = Gauge("gateway_sessions_open", "Sessions that take calls.")

_OPEN = "SELECT id FROM sessions WHERE NOT finished ORDER BY created"
_SESSION = "SELECT request, created, finished, reward, reason FROM sessions WHERE id = ?"
_INSERT_SESSION = "INSERT INTO sessions (id, request, created) VALUES (?, ?, ?)"
_SET_REWARD = "UPDATE sessions SET reward = ?, reason = ? WHERE id = ?"
_FINISH = "UPDATE sessions SET finished = 1 WHERE id = ?"
_RECORDS = "SELECT record FROM calls WHERE session = ? ORDER BY number"
_INSERT_CALL = "INSERT INTO calls (session, record) VALUES (?, ?)"
_LOST = "SELECT reason, tokens FROM lost WHERE session = ?"
_INSERT_LOST = "INSERT INTO lost VALUES (?, ?, ?)"
_DELETE = (
    "DELETE FROM sessions WHERE id = ?",
    "DELETE FROM calls WHERE session = ?",
    "DELETE FROM lost WHERE session = ?",
)


class Gateway:
    """All sessions. An async context manager. Open sessions are in memory, finished ones on disk only."""

    prompts: PromptMaker
    vocabulary: int
    """Token ids must be below this, because an engine may die of others."""
    context: int
    """Longest prompt and completion together, in tokens."""

    def __init__(self, settings: GatewaySettings, *, own_process: bool) -> None:
        self.settings = settings
        self._own_process = own_process
        self._store = Store(settings.directory)
        self._engine = EngineClient(settings.token)
        self._sessions: dict[str, Session] = {}
        self._created = int(time.time())
        self._creating = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Load the tokenizer and the open sessions.

        Raises:
            ConfigurationError: the model's tokenizer or configuration, or the sessions' directory, cannot be used.
            DependencyLostError: another process uses the directory.
        """
        await in_background(self._load_model)
        await self._store.open()
        for (session_id,) in await self._store.read(_OPEN):
            session = await self._load(session_id)
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
        await self._engine.close()
        await self._store.close()

    def _load_model(self) -> None:
        if self._own_process:
            import_transformers_alone()
        settings = self.settings
        self.prompts = PromptMaker(load_tokenizer(settings.model_name))
        self.vocabulary = vocabulary_size(settings.model_name, "MODEL_NAME")
        self.context = settings.engine_context_length or context_length(settings.model_name, "MODEL_NAME")

    async def _load(self, session_id: str) -> Session | None:
        """Return a session as it is on disk; None if there is none."""
        rows = await self._store.read(_SESSION, session_id)
        if not rows:
            return None
        request, created, finished, reward, reason = rows[0]
        session = Session(CreateSessionRequest.model_validate_json(request), created, bool(finished), reward, reason)
        for (record,) in await self._store.read(_RECORDS, session_id):
            session.tree.restore(orjson.loads(record))
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
            "max_model_len": self.context,
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

    async def complete(self, session: Session, request: ChatRequest) -> dict[str, Any]:
        """Return the chat completion that answers a request.

        A request that was answered before gets the same reply again, and a request that is being answered waits for
        that reply. The call goes on if its client leaves, so that the client can ask again.

        Raises:
            ProblemError: 400, the request cannot be answered; 409, the session is finished; 429, a limit is reached;
                507, the disk is full.
        """
        session.check_open()
        if (answered := session.tree.calls.get(request.digest)) is not None:
            REPEATED.inc()
            return answered.reply
        task = session.in_flight.get(request.digest)
        if task is None:
            try:
                limit = session.admit(request)
            except ProblemError as error:
                REFUSED.labels(error.members["error"]["code"]).inc()
                raise
            task = asyncio.create_task(self._call(session, request, limit))
            session.in_flight[request.digest] = task
            session.reserved_tokens += limit * request.n

            def done(task: asyncio.Task[dict[str, Any]]) -> None:
                del session.in_flight[request.digest]
                session.reserved_tokens -= limit * request.n
                if not task.cancelled():
                    task.exception()  # A call whose client left has nobody else to ask for it.

            task.add_done_callback(done)
        return await asyncio.shield(task)

    async def _call(self, session: Session, request: ChatRequest, limit: int) -> dict[str, Any]:
        """Sample, record and return the reply to a new request; each choice has ``limit`` tokens at most."""
        messages = request.fitted()
        keys = request.keys(messages)
        call = self._place(session, request, messages, keys)
        prompt_ids = [*(call.parent.held_ids if call.parent else ()), *call.added_ids]
        room = self.context - len(prompt_ids)
        if room < 1:
            detail = f"the conversation has {len(prompt_ids)} tokens; the context length is {self.context} tokens"
            refuse(400, detail, "context_length_exceeded")
        if not prompt_ids:
            raise ProblemError(400, "the model's tokenizer has no tokens for this conversation")
        if max(prompt_ids) >= self.vocabulary:
            raise ProblemError(400, f"token {max(prompt_ids)} is outside the model's {self.vocabulary} tokens")
        call.sampling["max_new_tokens"] = min(limit, room)
        completions = await self._sample(session, request, call.sampling, prompt_ids)
        add_turns(call, completions, request, keys[-1], self.prompts)
        call.reply = reply_of(call, request, self.settings.model_name, len(prompt_ids), self.prompts)
        await self._record(session, call)
        return call.reply

    def _place(
        self, session: Session, request: ChatRequest, messages: list[dict[str, Any]], keys: Sequence[bytes]
    ) -> Call:
        """Return the call, without turns, at its place in the tree."""
        asked = session.request
        sampling: dict[str, Any] = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": -1}
        if request.stop:
            sampling["stop"] = request.stop
        tools, options = request.offered_tools, request.chat_template_kwargs
        turn, known = session.tree.deepest(keys)
        if turn is not None:
            held = messages[known - 1]
            suffix = self.prompts.suffix(held, turn.completion, messages[known:], tools, options)
            if suffix is not None:
                return Call(request.digest, turn, suffix, request.messages[known:], sampling, {})
            BROKEN.inc()
        whole = self.prompts.whole(messages, tools, options)
        return Call(request.digest, None, whole, request.messages, sampling, {})

    async def _sample(
        self, session: Session, request: ChatRequest, sampling: dict[str, Any], prompt_ids: list[int]
    ) -> list[Completion]:
        """Return a completion for each choice.

        Raises:
            ProblemError: 400, the engine refuses the prompt; 429, no engine answered before the deadline.
        """

        async def choice(index: int) -> Completion:
            rid = f"{request.digest}-{derive_seed(session.id):x}-{index}"
            seed = session.request.seed
            seeded = {} if seed is None else {"sampling_seed": derive_seed(seed, request.digest, index)}
            return await self._engine.sample(
                prompt_ids, {**sampling, **seeded}, rid, session.seconds_left, lambda tokens: lose("aborted", tokens)
            )

        lost: Tally[str] = Tally()

        def lose(reason: str, tokens: int) -> None:
            lost[reason] += tokens

        answers = await asyncio.gather(*map(choice, range(request.n)), return_exceptions=True)
        completions = [answer for answer in answers if isinstance(answer, Completion)]
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            lose("incomplete", sum(len(completion.completion_ids) for completion in completions))
        for reason, tokens in lost.items():
            await self._lose(session, reason, tokens)
        if failures:
            _refuse_failed(session, failures[0])
        return completions

    async def _record(self, session: Session, call: Call) -> None:
        """Write a call to the disk, then add it to its session.

        Raises:
            ProblemError: 409, the session has finished meanwhile; 507, the disk is full.
        """
        async with session.lock:
            if session.is_finished:
                LOST.labels("finished").inc(call.sampled_tokens)
                session.check_open()
            record = orjson.dumps(call.record())
            try:
                await self._store.write((_INSERT_CALL, (session.id, record)))
            except ProblemError:
                LOST.labels("unwritten").inc(call.sampled_tokens)
                raise
            branches = session.tree.branches
            session.tree.add(call)
        CALLS.inc()
        SAMPLED.inc(call.sampled_tokens)
        BRANCHES.inc(session.tree.branches - branches)
        TOOL_CALLS.labels("true").inc(sum(len(turn.message.get("tool_calls", ())) for turn in call.turns))
        TOOL_CALLS.labels("false").inc(sum(turn.unparsed_calls for turn in call.turns))

    async def _lose(self, session: Session, reason: str, tokens: int) -> None:
        """Count tokens that engines sampled and the session will not have."""
        if not tokens:
            return
        LOST.labels(reason).inc(tokens)
        async with session.lock:
            if not session.is_finished:
                await self._store.write((_INSERT_LOST, (session.id, reason, tokens)))
                session.lost[reason] += tokens


def _refuse_failed(session: Session, failure: BaseException) -> None:
    """Raise the refusal that tells the agent why its call failed."""
    if isinstance(failure, DependencyLostError):
        session.refuse_late(str(failure))
    if isinstance(failure, RequestRefusedError):
        raise ProblemError(400, f"the engine refuses the request: {failure.detail}") from failure
    raise failure
