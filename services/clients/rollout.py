"""The client of the rollout workers: token ids in, completions with their log-probabilities out, through the router.

The client sends one request a prompt with ``n``, so that the worker computes the prompt once; with deterministic
engines, one request a completion. It asks again for completions that are missing, and continues those that were aborted
from the tokens that have come. It generates long completions in pieces, so that a worker that dies loses one piece.
Each completion continues as soon as its piece has come, while its tokens are still in the worker's cache. The client
decodes a completion of several pieces itself, because an engine sees no whole character where its bytes are cut. It
refuses token ids outside the vocabulary, because they would crash a worker.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from prometheus_client import Counter, Gauge
from tokenizers import Tokenizer

from services.core.endpoints import Endpoint, Task, endpoint
from services.core.errors import DependencyLostError, first_line
from services.core.logs import get_logger
from services.core.models import model_file
from services.engines.engine import ROUTED
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.groups import EMPTY, TokenSequence
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason
from services.weights.policy_store import ADAPTER_NAME

log = get_logger(__name__)


def _load_tokenizer(model_name: str | None) -> Tokenizer | None:
    """Load a tokenizer without transformers, which collectors do not have; None, with a warning, if that fails."""
    if model_name is None:
        return None
    try:
        return Tokenizer.from_file(str(model_file(model_name, "tokenizer.json")))
    except Exception as error:  # noqa: BLE001  # tokenizers raises no narrower one
        log.warning("characters between pieces of completions stay cut", model=model_name, reason=first_line(error))
        return None


def _text(tokenizer: Tokenizer, completion: TokenSequence, stop: Sequence[str]) -> str:
    """Return a completion's text without special tokens, up to the stop text or stop token that ended it."""
    ids = completion.completion_ids.tolist()
    text = tokenizer.decode(ids)
    if completion.finish_reason is not FinishReason.STOP:
        return text
    places = [text.find(end) for end in stop if end in text]
    return text[: min(places)] if places else tokenizer.decode(ids[:-1])


REQUESTS = Counter("rollout_requests", "Generation requests sent.")
COMPLETIONS = Counter("rollout_completions", "Completions received, by finish reason.", ["finish_reason"])
RESUBMITTED = Counter("rollout_resubmitted", "Completions asked for again, by reason.", ["reason"])
LOST = Counter("rollout_requests_lost", "Requests that no worker answered well, retries of router and client included.")
MISSING = Counter("rollout_missing", "Completions that could not be generated within deadline and tries.")
TOKENS = Counter("rollout_tokens", "Completion tokens received.")
IN_FLIGHT = Gauge("rollout_requests_in_flight", "Generation requests waiting for their answer.")

ROUTING_KEY = "X-SMG-Routing-Key"
"""The header by which the router chooses: requests of one key go to one worker, a new key's to the least busy one."""
ADAPTER_POLL_SECONDS = 0.5
"""Pause before a request is sent again to a worker that lacks the trained adapter."""
MAX_ROUNDS = 4
"""Requests in a row that bring no token of a completion; the group stays short by it after the last."""
PIECE_TOKENS = 2048
"""Most tokens of one request, less than a minute's work for most GPUs. The worker has the tokens before in its prefix
cache, so that a further request costs it next to nothing."""

LEAST_GENERATION_SECONDS = 600.0
LEAST_TOKENS_PER_SECOND = 10.0
"""An engine counts as hanging after the longer of LEAST_GENERATION_SECONDS and max_new_tokens /
LEAST_TOKENS_PER_SECOND."""


def generation_seconds(max_new_tokens: int) -> float:
    """Return the longest time that completions of up to ``max_new_tokens`` tokens take, retries included."""
    return max(LEAST_GENERATION_SECONDS, max_new_tokens / LEAST_TOKENS_PER_SECOND)


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling. ``top_k`` -1 and ``top_p`` 1 cut nothing; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    """Texts that end a completion, which goes without them."""


@dataclass(frozen=True)
class _Begun:
    """A completion on its way."""

    so_far: TokenSequence = EMPTY
    key: str = field(default_factory=functools.partial(secrets.token_hex, 8))
    """The routing key of its requests: the worker that has its tokens in its cache."""


_ByEnd = tuple[list[TokenSequence], list[_Begun]]
"""Completions that have ended, and those that are unfinished."""


@dataclass(frozen=True)
class _Seeds:
    """The seeds ``first``, ``first + step``, ``first + 2 * step`` ... of a request and of those that follow from it."""

    first: int
    step: int

    def of_next(self, place: int, count: int) -> _Seeds:
        """Return the seeds of one of ``count`` requests that continue this one, which share those that are left."""
        return _Seeds(self.first + self.step * (1 + place), self.step * count)


@dataclass
class _Call:
    """One call of ``generate``."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    end: float
    """The time, by time.monotonic(), after which it sends no request."""
    lost: DependencyLostError | None = None
    """The newest error of a request that no worker answered."""


class RolloutClient(HttpClient):
    """The rollout workers behind a router. An async context manager, used within one event loop."""

    def __init__(
        self,
        address: Endpoint | None = None,
        token: str | None = None,
        *,
        vocab_size: int,
        model_name: str | None = None,
        max_concurrency: int = 64,
        deadline_seconds: float = 600.0,
        seed_each_completion: bool = False,
        lora_path: str | None = None,
    ) -> None:
        """Make a client.

        Args:
            address: the router's, or one worker's; by default the job group's router.
            token: sent as ``Authorization: Bearer``.
            vocab_size: the prompts' token ids must be below this.
            model_name: the model whose tokenizer decodes completions of several pieces, loaded when the first one has
                come; None: their text is the pieces' texts, with U+FFFD where a character was cut.
            max_concurrency: prompts in flight; further calls wait.
            deadline_seconds: for one call of ``generate`` with all its tries, counted from when it is in flight.
            seed_each_completion: send one request a completion. With ENGINE_DETERMINISTIC, SGLang gives all
                completions of a request the same seed, and so the same tokens.
            lora_path: name of the LoRA adapter to generate with; None: the model alone.
        """
        super().__init__(
            (address or endpoint(Task.ROLLOUT_SERVER)).url,
            token=token,
            service=Task.ROLLOUT_SERVER.value,
            timeout=deadline_seconds,
            deadline=deadline_seconds,
            # ``max_concurrency`` bounds the requests; waiting for a connection would use up a request's deadline.
            max_connections=None,
        )
        self._vocab_size = vocab_size
        # Loaded at its first use, because most runs have no completions of several pieces.
        self._tokenizer = functools.cache(functools.partial(_load_tokenizer, model_name))
        self._loading = asyncio.Lock()
        self.seed_each_completion = seed_each_completion
        self.lora_path = lora_path
        self._places = asyncio.Semaphore(max_concurrency)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, seed: int | None = None
    ) -> list[TokenSequence]:
        """Return ``n`` completions of a prompt, or as many as could be generated.

        Lost completions are asked for again and aborted ones continued, each by itself, until MAX_ROUNDS requests in a
        row bring it no token or the deadline has passed. Each token keeps the log-probability and version with which it
        was sampled.

        Args:
            prompt_ids: token ids of the whole prompt.
            params: how to sample.
            n: number of completions.
            seed: of the call's first request; each further request has a larger one, which depends on the requests
                before it for the same completion and not on how long others take. None: the worker's own.

        Returns:
            At most ``n`` completions, none of them aborted. Missing ones are counted in ``rollout_missing_total``.

        Raises:
            ValueError: ``prompt_ids`` is empty, or an id is not below ``vocab_size``.
            RequestRefusedError: the engine refuses the request, for example because the prompt is too long.
            DependencyLostError: no completion could be generated within deadline and tries.
        """
        if not prompt_ids:
            raise ValueError("a prompt has at least one token")
        for token in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"prompt token {token} is outside the vocabulary of {self._vocab_size} tokens")
        sizes = [1] * n if self.seed_each_completion else [n]
        async with self._places:
            # The deadline starts here, so that waiting for a place uses up none of it.
            call = _Call(prompt_ids, params, end=time.monotonic() + self.deadline)
            try:
                done = await _all(
                    self._finish(call, _Begun(), size, None if seed is None else _Seeds(seed + i, len(sizes)))
                    for i, size in enumerate(sizes)
                )
            finally:
                call.end = 0.0  # where one request is refused, the other completions end with those under way
        MISSING.inc(max(n - len(done), 0))
        if not done:
            raise call.lost or DependencyLostError(f"{self.url} aborted every completion; see rollout-server's logs")
        return done[:n]

    async def _finish(
        self, call: _Call, begun: _Begun, n: int, seeds: _Seeds | None, idle: int = 0
    ) -> list[TokenSequence]:
        """Return ``n`` completions that begin with ``begun``, or as many as could be generated.

        Unfinished ones continue as soon as this request's reply is there, each in requests of its own.

        Args:
            call: the call that asks for them.
            begun: their beginning.
            n: number of completions.
            seeds: of this request and of those that continue it.
            idle: requests in a row, before this one, that brought no token.
        """
        if idle == MAX_ROUNDS or time.monotonic() >= call.end:
            return []
        done, unfinished = await self._send(call, begun, n, seeds)
        has_new = done or any(each.so_far.tokens > begun.so_far.tokens for each in unfinished)
        missing = n - len(done) - len(unfinished)
        sizes = [1] * missing if self.seed_each_completion else [missing] * (missing > 0)
        # Under a new key, so that another worker begins or continues what is missing.
        rest = [*((_Begun(begun.so_far), size) for size in sizes), *((each, 1) for each in unfinished)]
        return done + await _all(
            self._finish(call, each, size, seeds and seeds.of_next(i, len(rest)), 0 if has_new else idle + 1)
            for i, (each, size) in enumerate(rest)
        )

    async def complete(self, prompt: Prompt, params: SamplingParams, n: int, seed: int) -> list[TokenSequence]:
        """Return the completions of ``generate`` that have a token.

        Raises:
            RequestRefusedError: the engine refuses the prompt.
            DependencyLostError: there is none.
        """
        completions = await self.generate(prompt.prompt_ids, params, n=n, seed=seed)
        if not (completed := [one for one in completions if one.tokens]):
            raise DependencyLostError("every completion came back aborted or empty")
        return completed

    async def use_adapter_if_served(self) -> None:
        """Generate with the trained LoRA adapter from now on if the workers serve one."""
        probe = ROUTED.generate_body([0], {"max_new_tokens": 1}, lora_path=ADAPTER_NAME)
        try:
            await self.request("POST", ROUTED.generate_path, probe)
        except RequestRefusedError:
            return
        self.lora_path = ADAPTER_NAME

    async def _send(self, call: _Call, begun: _Begun, n: int, seeds: _Seeds | None) -> _ByEnd:
        """Send one request for the next piece of ``n`` completions that begin with ``begun``."""
        params = call.params
        left = params.max_new_tokens - begun.so_far.tokens
        # A stop text could begin in one piece and end in the next.
        piece = left if params.stop else min(left, PIECE_TOKENS)
        sampling = {**asdict(params), "max_new_tokens": piece, "n": n}
        if seeds is not None:
            sampling["sampling_seed"] = seeds.first % 2**31
        input_ids = [*call.prompt_ids, *begun.so_far.completion_ids.tolist()]
        body = ROUTED.generate_body(input_ids, sampling, lora_path=self.lora_path)
        REQUESTS.inc()
        try:
            with IN_FLIGHT.track_inprogress():
                reply = await self._ask(body, {ROUTING_KEY: begun.key}, call.end - time.monotonic())
            completions = ROUTED.read_completions(str(reply.url), reply.content)
        except DependencyLostError as error:
            LOST.inc()
            call.lost = error
            return [], []
        TOKENS.inc(sum(completion.tokens for completion in completions))
        RESUBMITTED.labels("missing").inc(max(n - len(completions), 0))
        done, unfinished = _sorted_by_end(begun, completions[:n], piece, params.max_new_tokens)
        if begun.so_far.tokens and done:
            async with self._loading:
                tokenizer = await asyncio.to_thread(self._tokenizer)
            if tokenizer is not None:
                done = [one.model_copy(update={"completion": _text(tokenizer, one, params.stop)}) for one in done]
        return done, unfinished

    async def _ask(self, body: dict[str, Any], headers: dict[str, str], deadline: float) -> httpx.Response:
        """Return the reply to a request, which waits for the trained adapter while a worker does not have it yet.

        So it is before the trainer has sent the first version, and in a worker that has started anew.
        """
        end = time.monotonic() + deadline
        while True:
            try:
                return await self.request(
                    "POST", ROUTED.generate_path, body, headers=headers, deadline=end - time.monotonic()
                )
            except RequestRefusedError as error:
                is_awaited = self.lora_path == ADAPTER_NAME and "not loaded" in str(error)
                if not is_awaited or time.monotonic() + ADAPTER_POLL_SECONDS > end:
                    raise
                await asyncio.sleep(ADAPTER_POLL_SECONDS)


async def _all(parts: Iterable[Coroutine[Any, Any, list[TokenSequence]]]) -> list[TokenSequence]:
    """Return the completions of all parts, which run at the same time, in the parts' order."""
    return [completion for part in await asyncio.gather(*parts) for completion in part]


def _sorted_by_end(begun: _Begun, received: Sequence[TokenSequence], piece: int, most: int) -> _ByEnd:
    """Return the completions that begin with ``begun`` and continue with the ``received`` tokens; count them.

    Args:
        begun: the beginning of all of them.
        received: up to ``piece`` further tokens of each.
        piece: tokens that were asked for.
        most: tokens of a whole completion.
    """
    done, unfinished = [], []
    for part in received:
        whole = begun.so_far.then(part)
        is_aborted = part.finish_reason is FinishReason.ABORT
        # A piece that the engine cut short has filled the model's context.
        is_short = part.finish_reason is FinishReason.LENGTH and part.tokens < piece
        if whole.tokens >= most or is_short or part.finish_reason is FinishReason.STOP:
            done.append(whole.model_copy(update={"finish_reason": FinishReason.LENGTH}) if is_aborted else whole)
            COMPLETIONS.labels(done[-1].finish_reason.value).inc()
            continue
        if is_aborted:
            COMPLETIONS.labels(FinishReason.ABORT.value).inc()
            RESUBMITTED.labels("aborted").inc()
        if whole.tokens:
            unfinished.append(_Begun(whole, begun.key))
    return done, unfinished
