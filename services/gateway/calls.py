"""Calls of agents: answered by the engines, on disk before their reply is sent.

A call is a pair of digest and number. The number is the lowest one that no other call of the digest has, recorded or in
flight, so equal requests are as many samples. The call's name is the digest, and for other numbers than 0 the number
behind it. Seeds, ids and the places in the record are made of names. A request repeats an earlier call, and gets its
bytes, only if

1. it has a key of an earlier request with the same body in its session: the ``Idempotency-Key`` of the client, or the
   mark that RetryingTransport keeps over its attempts. Keys are recorded.
2. it has no ``Idempotency-Key``, and its client counts it as a retry (``x-stainless-retry-count``). It gets the newest
   equal call that no such retry has repeated: of those in flight, or else of those that were answered.

Everything else is a new call, within the limits of the session.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import httpx
import orjson
from prometheus_client import Counter, Gauge

from services.chat.messages import for_template
from services.chat.prompts import IGNORES_TOOLS, ChatPrompts
from services.chat.tokenizers import load_tokenizer
from services.clients.rollout import ROUTING_KEY
from services.core.endpoints import Task, endpoint
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.core.models import context_length, vocabulary_size
from services.engines.engine import ROUTED
from services.gateway.chat_api import Api, add_turns, reply_of
from services.gateway.requests import ChatRequest
from services.gateway.sessions import Asker, Session
from services.gateway.settings import GatewaySettings
from services.gateway.store import RECORDED_TOKENS, Store
from services.gateway.tree import Call
from services.http.client import (
    CONNECT_SECONDS,
    KEEP_ALIVE_SECONDS,
    RequestRefusedError,
    describe,
    problem_detail,
    watched_socket,
)
from services.http.problems import ProblemError, refuse
from services.protocol.base import derive_seed
from services.protocol.groups import TokenSequence
from services.protocol.rewards import FinishReason

log = get_logger(__name__)


CALLS = Counter("gateway_calls", "Calls answered with newly sampled turns.")
REPEATED = Counter("gateway_calls_repeated", "Calls answered with the reply that was given before.")
REFUSED = Counter("gateway_calls_refused", "Calls refused because a session's limit was reached, by limit.", ["limit"])
TOOL_CALLS = Counter("gateway_tool_calls", "Tool calls that models wrote, by whether they could be parsed.", ["parsed"])
BRANCHES = Counter("gateway_branches", "Calls at a place of a conversation where another call was before.")
BROKEN = Counter("gateway_broken_prefixes", "Calls rendered whole, since the template changes a turn later on.")

_INSERT_CALL = "INSERT INTO calls (session, record) VALUES (?, ?)"
_INSERT_LOST = "INSERT INTO lost VALUES (?, ?, ?)"


class Calls:
    """The calls of all sessions.

    Attributes:
        prompts: makes the prompts of the model.
        vocabulary: token ids must be below this, because an engine may die of others.
        context: longest prompt and completion together, in tokens.
    """

    def __init__(self, settings: GatewaySettings, store: Store) -> None:
        """Load the model's tokenizer and configuration.

        Raises:
            ConfigurationError: they cannot be used.
        """
        model = settings.model_name
        self.vocabulary = vocabulary_size(model, "MODEL_NAME")
        self.context = settings.engine_context_length or context_length(model, "MODEL_NAME")
        self.prompts = ChatPrompts(load_tokenizer(model), settings.chat_template_args, self.context)
        self._model = model
        self._store = store
        self._engine = EngineClient(settings.token)
        self._has_seen_tools = False

    async def close(self) -> None:
        """Close the connections to the engines."""
        await self._engine.close()

    async def complete(self, session: Session, request: ChatRequest, api: Api, asker: Asker) -> Call:
        """Return the call that answers a request: a new one, or the earlier one that the request repeats.

        The call continues if its client leaves, so that the client can ask again. Its reply is as ``api`` has it.

        Raises:
            ProblemError: 400, the request cannot be answered; 409, the session is finished; 429, a limit is reached;
                507, the disk is full.
        """
        session.check_open()
        name = session.earlier(request.digest, asker)
        if name is None:
            name = self._begin(session, request, api)
        else:
            REPEATED.inc()
            session.repeated += 1
        session.names.update({(request.digest, key): name for key in asker.keys})
        recorded = session.tree.calls.get(name)
        return await asyncio.shield(session.in_flight[name]) if recorded is None else recorded

    def _begin(self, session: Session, request: ChatRequest, api: Api) -> str:
        """Begin a new call and return its name; raises ProblemError, 429, if a limit is reached."""
        try:
            limit = session.admit(request)
        except ProblemError as error:
            REFUSED.labels(error.members["error"]["code"]).inc()
            raise
        name = session.begin(request.digest)

        async def call() -> Call:
            try:
                with session.waits.running():
                    return await self._call(session, request, limit, api, name)
            except BaseException:
                session.forget(name)
                raise
            finally:
                # Not in a callback of the task: in the turn before that, a recorded call would count twice.
                del session.in_flight[name]
                session.reserved_tokens -= limit * request.n

        task = asyncio.create_task(call())
        session.in_flight[name] = task
        session.reserved_tokens += limit * request.n
        # A call whose client left has nobody else to ask for its error.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return name

    async def count(self, session: Session, request: ChatRequest) -> int:
        """Return the number of tokens of the prompt that a request would have.

        Raises:
            ProblemError: 400, the conversation is not readable.
        """
        call, _ = await self._place(session, request, request.digest)
        return len(call.prompt_ids)

    async def _call(self, session: Session, request: ChatRequest, limit: int, api: Api, name: str) -> Call:
        """Sample, record and return a new call; each choice has ``limit`` tokens at most."""
        call, key = await self._place(session, request, name)
        prompt_ids = call.prompt_ids
        room = self.context - len(prompt_ids)
        if room < 1:
            detail = f"the conversation has {len(prompt_ids)} tokens; the context length is {self.context} tokens"
            refuse(400, detail, "context_length_exceeded")
        if not prompt_ids:
            raise ProblemError(400, "the model's tokenizer has no tokens for this conversation")
        if max(prompt_ids) >= self.vocabulary:
            raise ProblemError(400, f"token {max(prompt_ids)} is outside the model's {self.vocabulary} tokens")
        call.sampling["max_new_tokens"] = min(limit, room)
        completions = await self._sample(session, request, call, prompt_ids)
        add_turns(call, completions, request, key, self.prompts)
        completion = reply_of(call, request, self._model, len(prompt_ids), self.prompts)
        call.reply = api.reply(completion, request)
        await self._record(session, call)
        return call

    async def _place(self, session: Session, request: ChatRequest, name: str) -> tuple[Call, bytes]:
        """Return the call, without turns, at its place in the tree, and the key of its conversation."""
        limits, (messages, keys) = session.request, request.fitted()
        sampling: dict[str, Any] = {"temperature": limits.temperature, "top_p": limits.top_p, "top_k": -1}
        if request.stop:
            sampling["stop"] = request.stop
        tools, options = request.offered_tools, request.chat_template_kwargs
        turn, length = session.tree.deepest(keys, messages)
        if turn is not None:
            held, following = for_template(turn.message), messages[length:]
            suffix = await self.prompts.suffix(held, turn.completion, following, tools, options)
            if suffix is not None:
                return Call(name, turn, suffix, request.messages[length:], sampling, {}, bool(tools)), keys[-1]
            BROKEN.inc()
        whole = await self.prompts.whole(messages, tools, options)
        if tools and not self._has_seen_tools:
            self._has_seen_tools = True
            if self.prompts.render(messages, None, options) == self.prompts.render(messages, tools, options):
                log.warning(IGNORES_TOOLS)
        return Call(name, None, whole, request.messages, sampling, {}, bool(tools)), keys[-1]

    async def _sample(
        self, session: Session, request: ChatRequest, call: Call, prompt_ids: list[int]
    ) -> list[TokenSequence]:
        """Return a completion for each choice.

        Raises:
            ProblemError: 400, the engine refuses the prompt; 429, no engine answered before the deadline.
        """
        aborted: list[int] = []

        async def choice(index: int) -> TokenSequence | Exception:
            rid = f"{call.name}-{derive_seed(session.id):x}-{index}"
            seed = session.request.seed
            seeded = {} if seed is None else {"sampling_seed": derive_seed(seed, call.name, index)}
            try:
                return await self._engine.sample(session, prompt_ids, {**call.sampling, **seeded}, rid, aborted)
            except Exception as error:  # noqa: BLE001  # raised below, once the other choices are there
                return error

        # A task for the only choice would take three more turns of the event loop.
        answers = [await choice(0)] if request.n == 1 else await asyncio.gather(*map(choice, range(request.n)))
        completions = [answer for answer in answers if isinstance(answer, TokenSequence)]
        failures = [answer for answer in answers if isinstance(answer, Exception)]
        await self._lose(session, "aborted", sum(aborted))
        if failures:
            await self._lose(session, "incomplete", sum(completion.tokens for completion in completions))
            failure = failures[0]
            if isinstance(failure, DependencyLostError):
                session.refuse_late(str(failure))
            if isinstance(failure, RequestRefusedError):
                raise ProblemError(400, f"the engine refuses the request: {failure.detail}") from failure
            raise failure
        return completions

    async def _record(self, session: Session, call: Call) -> None:
        """Write a call to the disk, then add it to its session.

        Raises:
            ProblemError: 409, the session has finished meanwhile; 507, the disk is full.
        """
        async with session.lock:
            if session.is_finished:
                await self._store.lose("finished", call.sampled_tokens)
                session.check_open()
            record = session.record(call)
            await self._store.enter(
                RECORDED_TOKENS, call.sampled_tokens, (_INSERT_CALL, (session.id, orjson.dumps(record)))
            )
            branches = session.tree.branches
            session.tree.add(call)
        CALLS.inc()
        BRANCHES.inc(session.tree.branches - branches)
        TOOL_CALLS.labels("true").inc(sum(len(turn.message.get("tool_calls", ())) for turn in call.turns))
        TOOL_CALLS.labels("false").inc(sum(turn.unparsed_calls for turn in call.turns))

    async def _lose(self, session: Session, reason: str, tokens: int) -> None:
        """Count tokens that engines sampled and the session will not have."""
        if not tokens:
            return
        async with session.lock:
            if session.is_finished:
                await self._store.lose(reason, tokens)
            else:
                await self._store.lose(reason, tokens, (_INSERT_LOST, (session.id, reason, tokens)))
                session.lost[reason] += tokens


RETRIED = Counter("gateway_turns_retried", "Turns asked for again, by reason.", ["reason"])
IN_FLIGHT = Gauge("gateway_turns_in_flight", "Turns that the engines are sampling.")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
_TRY_LATER = frozenset({408, 429})


class EngineClient:
    """The engines behind the router, used within one event loop.

    Every attempt has a request id of its own, because an engine may still be busy with an attempt whose connection was
    lost, and refuses an id that it knows. All attempts have the same seed, so that they sample the same tokens.
    aiohttp sends them, because httpx takes more time for a request than all the rest of a call.
    """

    def __init__(self, token: str | None) -> None:
        self._url = endpoint(Task.ROLLOUT_SERVER).url + ROUTED.generate_path
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    @functools.cached_property
    def _http(self) -> aiohttp.ClientSession:
        """The connections, which are made within the event loop. Each new one resolves the router's name again."""
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, use_dns_cache=False, socket_factory=watched_socket
        )
        return aiohttp.ClientSession(connector=connector, headers=self._headers)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def sample(
        self, session: Session, prompt_ids: Sequence[int], sampling: dict[str, Any], rid: str, aborted: list[int]
    ) -> TokenSequence:
        """Return a completion that was not aborted; ask again for a lost or aborted one until the session's deadline.

        Args:
            session: the router sends its requests to one worker, which has the conversation in its cache.
            prompt_ids: token ids of the whole prompt.
            sampling: the parameters of sampling; see ``Engine.generate_body``.
            rid: the request's id; the number of the attempt is appended.
            aborted: gets the number of tokens of each aborted completion.

        Raises:
            RequestRefusedError: the engine refuses the request.
            DependencyLostError: no completion came within the deadline.
        """
        seconds, lora_path = session.seconds_left, session.request.lora_path
        end = time.monotonic() + seconds
        attempt, pause, failure = 0, FIRST_PAUSE_SECONDS, "the deadline had passed before the first attempt"
        with IN_FLIGHT.track_inprogress():
            while (left := end - time.monotonic()) > 0:
                body = ROUTED.generate_body(prompt_ids, sampling, lora_path=lora_path, rid=f"{rid}-{attempt}")
                try:
                    completion = await self._ask(session.id, body, left)
                    if completion.finish_reason is not FinishReason.ABORT and completion.tokens:
                        return completion
                    aborted.append(completion.tokens)
                    reason, failure = "aborted", "the engine aborted the request"
                except DependencyLostError as error:
                    reason, failure = "lost", str(error)
                RETRIED.labels(reason).inc()
                log.warning("a turn is asked for again", rid=rid, attempt=attempt, reason=failure)
                await asyncio.sleep(min(pause, max(end - time.monotonic(), 0)))
                attempt, pause = attempt + 1, min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise DependencyLostError(f"no engine answered within {seconds:.1f} s and {attempt} attempts: {failure}")

    async def _ask(self, session_id: str, payload: dict[str, Any], seconds: float) -> TokenSequence:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(CONNECT_SECONDS, seconds))
        headers, data = {ROUTING_KEY: session_id}, orjson.dumps(payload)
        try:
            async with self._http.post(self._url, data=data, headers=headers, timeout=timeout) as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError.
            raise DependencyLostError(f"{self._url} did not answer within {seconds:g} s: {describe(error)}") from error
        if status != 200:
            detail = problem_detail(httpx.Response(status, content=body))
            if status >= 500 or status in _TRY_LATER:
                raise DependencyLostError(f"{self._url} answered {status} {detail}")
            raise RequestRefusedError(Task.ROLLOUT_SERVER.value, self._url, status, detail)
        [completion] = ROUTED.read_completions(self._url, body)
        return completion
