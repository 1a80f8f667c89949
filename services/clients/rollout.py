"""The client of the rollout workers: token ids in, completions with their log-probabilities out, through the router.

The client sends one request a prompt with ``n``, so that the worker computes the prompt once; with deterministic
engines, one request a completion. It asks again for completions that are missing or aborted. It refuses token ids
outside the vocabulary, because they would crash a worker.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson
from prometheus_client import Counter, Gauge
from pydantic import ValidationError

from services.core.endpoints import Endpoint, Task, endpoint
from services.core.errors import DependencyLostError
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.groups import Completion, FinishReason, VersionSpan
from services.weights.adapter_files import ADAPTER_NAME

REQUESTS = Counter("rollout_requests", "Generation requests sent.")
COMPLETIONS = Counter("rollout_completions", "Completions received, by finish reason.", ["finish_reason"])
RESUBMITTED = Counter("rollout_resubmitted", "Completions asked for again, by reason.", ["reason"])
LOST = Counter("rollout_requests_lost", "Requests that no worker answered well, retries of router and client included.")
MISSING = Counter("rollout_missing", "Completions that could not be had within deadline and tries.")
TOKENS = Counter("rollout_tokens", "Completion tokens received.")
IN_FLIGHT = Gauge("rollout_requests_in_flight", "Generation requests waiting for their answer.")

ROUTING_KEY = "X-SMG-Routing-Key"
"""The header by which the router chooses: requests of one key go to one worker, a new key's to the least busy one."""
MAX_ROUNDS = 4
"""Rounds of requests for a prompt's completions; a group may stay short after the last."""


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


class RolloutClient(HttpClient):
    """The rollout workers behind a router. An async context manager, used within one event loop."""

    def __init__(
        self,
        address: Endpoint | None = None,
        token: str | None = None,
        *,
        vocab_size: int,
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
        self.seed_each_completion = seed_each_completion
        self.lora_path = lora_path
        self._places = asyncio.Semaphore(max_concurrency)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, seed: int | None = None
    ) -> list[Completion]:
        """Return ``n`` completions of a prompt, or as many as could be generated.

        Completions that were aborted or lost are asked for again, up to MAX_ROUNDS times within the deadline.

        Args:
            prompt_ids: token ids of the whole prompt.
            params: how to sample.
            n: number of completions.
            seed: of the call's first request; the i-th further request has seed + i. None: the worker's own.

        Returns:
            At most ``n`` completions, none of them aborted. Missing ones are counted in ``rollout_missing_total``.

        Raises:
            ValueError: ``prompt_ids`` is empty, or an id is not below ``vocab_size``.
            RequestRefusedError: the engine refuses the request, for example because the prompt is too long.
            DependencyLostError: no completion could be generated within deadline and tries.
        """
        request = self._request_of(prompt_ids, params)
        done: list[Completion] = []
        lost: DependencyLostError | None = None
        sent = 0
        async with self._places:
            # The deadline starts here, so that waiting for a place uses up none of it.
            end = time.monotonic() + self.deadline
            for number in range(1, MAX_ROUNDS + 1):
                missing, left = n - len(done), end - time.monotonic()
                if missing <= 0 or left <= 0:
                    break
                first_seed = None if seed is None else seed + sent
                received, error = await self._ask(request, missing, first_seed, left)
                sent += missing if self.seed_each_completion else 1
                whole = [c for c in received if c.finish_reason is not FinishReason.ABORT]
                done += whole
                if error is not None:
                    # The router has tried other workers already; by the next round it may have dropped a dead worker.
                    lost = error
                elif number < MAX_ROUNDS:
                    aborted = len(received) - len(whole)
                    RESUBMITTED.labels("aborted").inc(aborted)
                    RESUBMITTED.labels("missing").inc(max(n - len(done) - aborted, 0))
        MISSING.inc(max(n - len(done), 0))
        if lost is not None and not done:
            raise lost
        return done[:n]

    async def find_adapter(self) -> str | None:
        """Generate with the trained LoRA adapter from now on if the workers serve one; return its name."""
        probe = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "lora_path": ADAPTER_NAME}
        try:
            await self.request("POST", "/generate", probe)
        except RequestRefusedError:
            return None
        self.lora_path = ADAPTER_NAME
        return ADAPTER_NAME

    async def _ask(
        self, request: dict[str, Any], n: int, first_seed: int | None, deadline: float
    ) -> tuple[list[Completion], DependencyLostError | None]:
        """Send the requests for ``n`` completions; return the completions and the first error, if any was lost."""
        sizes = [1] * n if self.seed_each_completion else [n]
        seeds = [None if first_seed is None else first_seed + i for i in range(len(sizes))]
        replies = await asyncio.gather(
            *(self._send(request, size, seed, deadline) for size, seed in zip(sizes, seeds, strict=True))
        )
        completions = [completion for received, _ in replies for completion in received]
        return completions, next((error for _, error in replies if error is not None), None)

    async def _send(
        self, request: dict[str, Any], n: int, seed: int | None, deadline: float
    ) -> tuple[list[Completion], DependencyLostError | None]:
        sampling = {**request["sampling_params"], "n": n}
        if seed is not None:
            sampling["sampling_seed"] = seed % 2**31
        REQUESTS.inc()
        try:
            with IN_FLIGHT.track_inprogress():
                reply = await self.request(
                    "POST",
                    "/generate",
                    {**request, "sampling_params": sampling},
                    headers={ROUTING_KEY: secrets.token_hex(8)},
                    deadline=deadline,
                )
            completions = read_completions(str(reply.url), reply.content)
        except DependencyLostError as error:
            LOST.inc()
            return [], error
        for completion in completions:
            COMPLETIONS.labels(completion.finish_reason.value).inc()
            TOKENS.inc(len(completion.completion_ids))
        return completions, None

    def _request_of(self, prompt_ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
        if not prompt_ids:
            raise ValueError("a prompt has at least one token")
        for token in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"prompt token {token} is outside the vocabulary of {self._vocab_size} tokens")
        return {
            "input_ids": list(prompt_ids),
            "sampling_params": asdict(params),
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_text_in_logprobs": False,
            **({"lora_path": self.lora_path} if self.lora_path else {}),
        }


def read_completions(url: str, reply: bytes) -> list[Completion]:
    """Return the completions of ``url``'s reply to SGLang's /generate, which is one record or a list of records.

    Raises:
        DependencyLostError: the reply is something else.
    """
    try:
        body = orjson.loads(reply)
        return [_completion(record) for record in (body if isinstance(body, list) else [body])]
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise DependencyLostError(f"{url} answered with something else than completions: {error}") from error


def _completion(record: dict[str, Any]) -> Completion:
    meta = record["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    ids = [pair[1] for pair in pairs]
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(ids)}]
    return Completion(
        completion=record.get("text") or "",
        completion_ids=ids,
        logprobs=[pair[0] for pair in pairs],
        policy_versions=[
            VersionSpan(version=int(span["version"]), start=span["start"], end=span["end"]) for span in spans
        ],
        finish_reason=FinishReason(meta["finish_reason"]["type"]),
    )
