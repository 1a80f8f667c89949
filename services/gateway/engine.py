"""The gateway's client of the engines: one turn a request, token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import httpx
import orjson
from prometheus_client import Counter, Gauge

from services.clients.completions import read_completions
from services.clients.rollout import ROUTING_KEY
from services.core.endpoints import Task, endpoint
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.http.client import (
    CONNECT_SECONDS,
    KEEP_ALIVE_SECONDS,
    RequestRefusedError,
    describe,
    problem_detail,
    watched_socket,
)
from services.protocol.groups import Completion, FinishReason

log = get_logger(__name__)

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
        self._url = f"{endpoint(Task.ROLLOUT_SERVER).url}/generate"
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    @functools.cached_property
    def _http(self) -> aiohttp.ClientSession:
        """The connections, which are made within the event loop. Each new one resolves the router's name anew."""
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, use_dns_cache=False, socket_factory=watched_socket
        )
        return aiohttp.ClientSession(connector=connector, headers=self._headers)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def sample(
        self,
        session_id: str,
        prompt_ids: Sequence[int],
        sampling: dict[str, Any],
        rid: str,
        seconds: float,
        on_aborted: Callable[[int], None],
        lora_path: str | None = None,
    ) -> Completion:
        """Return a completion that was not aborted; ask again for a lost or aborted one until the deadline.

        Args:
            session_id: the router sends a session's requests to one worker, which has the conversation in its cache.
            prompt_ids: token ids of the whole prompt.
            sampling: ``sampling_params`` of SGLang's /generate.
            rid: the request's id; the number of the attempt is appended.
            seconds: for all attempts.
            on_aborted: called with the number of tokens of each aborted completion.
            lora_path: name of the LoRA adapter to sample with; None: the model alone.

        Raises:
            RequestRefusedError: the engine refuses the request.
            DependencyLostError: there is no completion within the deadline.
        """
        payload = {
            "input_ids": list(prompt_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_text_in_logprobs": False,
            **({"lora_path": lora_path} if lora_path else {}),
        }
        end = time.monotonic() + seconds
        attempt, pause, failure = 0, FIRST_PAUSE_SECONDS, "the deadline had passed before the first attempt"
        with IN_FLIGHT.track_inprogress():
            while (left := end - time.monotonic()) > 0:
                try:
                    completion = await self._ask(session_id, {**payload, "rid": f"{rid}-{attempt}"}, left)
                    if completion.finish_reason is not FinishReason.ABORT and completion.completion_ids:
                        return completion
                    on_aborted(len(completion.completion_ids))
                    reason, failure = "aborted", "the engine aborted the request"
                except DependencyLostError as error:
                    reason, failure = "lost", str(error)
                RETRIED.labels(reason).inc()
                log.warning("a turn is asked for again", rid=rid, attempt=attempt, reason=failure)
                await asyncio.sleep(min(pause, max(end - time.monotonic(), 0)))
                attempt, pause = attempt + 1, min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise DependencyLostError(f"no engine answered within {seconds:.1f} s and {attempt} attempts: {failure}")

    async def _ask(self, session_id: str, payload: dict[str, Any], seconds: float) -> Completion:
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
        [completion] = read_completions(self._url, body)
        return completion
