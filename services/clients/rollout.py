"""Generates completions through the router: token ids in, completions with their log-probabilities out.

One request a prompt with ``n``, so that the worker computes the prompt once; where engines are deterministic, one a
completion. What comes back short or aborted is asked for again; an id outside the vocabulary is refused here, since it
would take a worker down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client import Counter, Gauge
from pydantic import ValidationError

from services.core import endpoints
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.http.client import HttpClient
from services.protocol import Completion, FinishReason, VersionSpan

log = get_logger(__name__)

REQUESTS = Counter("rollout_requests", "Generation requests sent.")
COMPLETIONS = Counter("rollout_completions", "Completions received, by finish reason.", ["finish_reason"])
RESUBMITTED = Counter("rollout_resubmitted", "Completions asked for again, by reason.", ["reason"])
LOST = Counter("rollout_requests_lost", "Requests that no worker answered well, retries of router and client included.")
MISSING = Counter("rollout_missing", "Completions that could not be had within deadline and tries.")
TOKENS = Counter("rollout_tokens", "Completion tokens received.")
IN_FLIGHT = Gauge("rollout_requests_in_flight", "Generation requests waiting for their answer.")

MAX_ROUNDS = 4
"""How often a prompt's missing completions are asked for before the group stays short."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. ``top_k`` of -1 and ``top_p`` of 1 cut nothing; a temperature of 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: Sequence[int] = ()


class RolloutClient:
    """Completions from the rollout workers behind a router. An async context manager, used within one event loop."""

    def __init__(
        self,
        endpoint: endpoints.Endpoint | None = None,
        token: str | None = None,
        *,
        vocab_size: int,
        max_concurrency: int = 64,
        deadline_seconds: float = 600.0,
        seed_each_completion: bool = False,
    ) -> None:
        """Makes a client.

        Args:
            endpoint: the router's, or one worker's; by default the job group's router.
            token: sent as ``Authorization: Bearer``.
            vocab_size: ids of prompts must be below.
            max_concurrency: prompts in flight; further calls wait.
            deadline_seconds: for one call of ``generate``, all tries included, from when it is in flight.
            seed_each_completion: ask for each completion by itself. With ENGINE_DETERMINISTIC, SGLang gives all
                completions of a request its seed, and so the same tokens.
        """
        address = endpoint or endpoints.router()
        self.vocab_size = vocab_size
        self.deadline_seconds = deadline_seconds
        self.seed_each_completion = seed_each_completion
        self._places = asyncio.Semaphore(max_concurrency)
        self._http = HttpClient(
            address.url,
            token=token,
            service="rollout-server",
            timeout=deadline_seconds,
            deadline=deadline_seconds,
            # The places bound them, and a request that waited for a connection would lose of its deadline.
            max_connections=None,
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, seed: int | None = None
    ) -> list[Completion]:
        """``n`` completions of a prompt, or those that could be had.

        Completions that were aborted or lost are asked for again, up to MAX_ROUNDS times within the deadline; whole
        ones are kept. With a ``seed``, the i-th request of the call has seed + i, so that a repeated call draws the
        same.

        Args:
            prompt_ids: token ids of the whole prompt.
            params: how to sample.
            n: completions.
            seed: of the sampling; by default the worker's own.

        Returns:
            At most ``n`` completions, none of them aborted. Fewer are counted in ``rollout_missing_total``.

        Raises:
            ValueError: an id is not below ``vocab_size``, or there is none.
            RequestRefusedError: the engine refuses the request, such as a prompt that is too long.
            DependencyLostError: not one completion could be had within deadline and tries.
        """
        self._check(prompt_ids)
        done: list[Completion] = []
        lost: DependencyLostError | None = None
        sent = 0
        async with self._places:
            # A prompt that waited for its place has all of its time left.
            end = time.monotonic() + self.deadline_seconds
            for attempt in range(MAX_ROUNDS):
                left = end - time.monotonic()
                missing = n - len(done)
                if left <= 0 or missing <= 0:
                    break
                counts = [1] * missing if self.seed_each_completion else [missing]
                seeds = [None if seed is None else seed + sent + i for i in range(len(counts))]
                sent += len(counts)
                received, failed = await self._ask(prompt_ids, params, counts, seeds, left)
                done += [c for c in received if c.finish_reason is not FinishReason.ABORT]
                if failed:
                    # The router has tried other workers already; by now it may know better which are left.
                    lost = failed[0]
                elif attempt + 1 < MAX_ROUNDS:
                    aborted = sum(c.finish_reason is FinishReason.ABORT for c in received)
                    RESUBMITTED.labels("aborted").inc(aborted)
                    RESUBMITTED.labels("missing").inc(max(n - len(done) - aborted, 0))
        MISSING.inc(max(n - len(done), 0))
        if lost is not None and not done:
            raise lost
        return done[:n]

    async def _ask(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        counts: Sequence[int],
        seeds: Sequence[int | None],
        deadline: float,
    ) -> tuple[list[Completion], list[DependencyLostError]]:
        """Sends a request for each of ``counts`` at once; what came of them, and what those that were lost met."""

        async def one(n: int, seed: int | None) -> list[Completion] | DependencyLostError:
            try:
                return await self._request(prompt_ids, params, n, seed, deadline)
            except DependencyLostError as error:
                LOST.inc()
                return error

        answers = await asyncio.gather(*map(one, counts, seeds))
        failed = [answer for answer in answers if isinstance(answer, DependencyLostError)]
        return [c for answer in answers if not isinstance(answer, DependencyLostError) for c in answer], failed

    async def _request(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, seed: int | None, deadline: float
    ) -> list[Completion]:
        sampling: dict[str, Any] = {**asdict(params), "n": n, "stop_token_ids": list(params.stop_token_ids)}
        if seed is not None:
            sampling["sampling_seed"] = seed % 2**31
        payload = {
            "input_ids": list(prompt_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_text_in_logprobs": False,
        }
        REQUESTS.inc()
        with IN_FLIGHT.track_inprogress():
            response = await self._http.request("POST", "/generate", payload=payload, deadline=deadline)
        completions = self._read(response)
        for completion in completions:
            COMPLETIONS.labels(completion.finish_reason.value).inc()
            TOKENS.inc(len(completion.completion_ids))
        return completions

    def _read(self, response: httpx.Response) -> list[Completion]:
        try:
            body = response.json()
            return [_completion(record) for record in (body if isinstance(body, list) else [body])]
        except (KeyError, TypeError, ValueError, ValidationError) as error:
            raise DependencyLostError(f"{response.url} answered what is not a completion: {error}") from error

    def _check(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise ValueError("a prompt has at least one token")
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self.vocab_size:
            wrong = next(token for token in prompt_ids if not 0 <= token < self.vocab_size)
            raise ValueError(f"prompt token {wrong} is not below the vocabulary size {self.vocab_size}")


def _completion(record: dict[str, Any]) -> Completion:
    """A completion from one record of SGLang's /generate reply."""
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
