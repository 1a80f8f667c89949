"""The HTTP client below all clients: JSON over HTTP with a token, deadlines, and retries that are bounded and counted.

A request is tried again when the service could not be reached, did not answer in time, or said that it cannot now
(429, 502, 503, 504): the services' routes may be repeated without harm. Anything else is final. Its deadline alone
bounds the tries, so that a node has as long as the settings say to come back, however quickly connecting to it fails.
"""

from __future__ import annotations

import asyncio
import socket
import time
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import orjson
import stamina
from prometheus_client import Counter
from pydantic import BaseModel, ValidationError

from services.core.errors import DependencyLostError

Reply = TypeVar("Reply", bound=BaseModel)

RETRIES = Counter("client_retries", "Requests that were tried again.", ["service"])

# Names are resolved anew for every connection: one that idled this long is not used again, so that a node which was
# recovered under another address is found.
KEEP_ALIVE_SECONDS = 5.0
CONNECT_SECONDS = 5.0

# A node that is destroyed says nothing: a connection to it stays open, and an answer that may take minutes is waited
# for in vain. So the system probes the other side after some silence, and gives the connection up if nothing comes.
SILENCE_SECONDS = 10
PROBE_SECONDS = 5
PROBES = 3
GIVEN_UP_SECONDS = SILENCE_SECONDS + PROBES * PROBE_SECONDS

_RETRIED_STATUS = frozenset({429, 502, 503, 504})
_RETRIED_ERRORS = (httpx.TimeoutException, httpx.NetworkError, httpx.ProtocolError, httpx.ProxyError)


class RequestRefusedError(Exception):
    """The service refused the request (4xx); ``detail`` is what its problem document says."""

    def __init__(self, service: str, url: str, status: int, detail: str) -> None:
        super().__init__(f"{service} refused {url}: {status} {detail}")
        self.service = service
        self.status = status
        self.detail = detail


class _RetryableStatusError(Exception):
    """The service answered that it cannot answer now."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"{response.status_code} {problem_detail(response)}")
        self.retry_after = _seconds(response.headers.get("Retry-After"))


class HttpClient:
    """Requests to one service. An async context manager, used within one event loop."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeout: float = 30.0,
        service: str = "service",
        deadline: float = 90.0,
        max_connections: int | None = 256,
    ) -> None:
        """Makes a client.

        Args:
            base_url: such as ``http://reward-server-0.group:8002``.
            token: sent as ``Authorization: Bearer``.
            timeout: seconds that one attempt may take between bytes.
            service: its name in errors and metrics.
            deadline: seconds that one request may take with all its attempts, unless the call says otherwise.
            max_connections: open at once; further requests wait for one. None: as many as there are requests.
        """
        self.service = service
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout
        self.deadline = deadline
        self._retries = RETRIES.labels(service)
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {token}"} if token else None,
            transport=transport(httpx.Limits(max_connections=max_connections, keepalive_expiry=KEEP_ALIVE_SECONDS)),
            # A proxy from the environment must not come between the nodes of a job group.
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def get_json(
        self,
        path: str,
        reply_model: type[Reply],
        *,
        params: dict[str, Any] | None = None,
        deadline: float | None = None,
    ) -> Reply:
        """GET ``path``; raises as ``request`` does."""
        response = await self.request("GET", path, params=params, deadline=deadline)
        return self._parse(response, reply_model)

    async def post_json(
        self,
        path: str,
        payload: BaseModel | dict[str, Any],
        reply_model: type[Reply],
        *,
        deadline: float | None = None,
        attempt_seconds: float | None = None,
    ) -> Reply:
        """POST ``payload`` as JSON; raises as ``request`` does."""
        response = await self.request("POST", path, payload=payload, deadline=deadline, attempt_seconds=attempt_seconds)
        return self._parse(response, reply_model)

    async def request(
        self,
        method: str,
        path: str,
        *,
        payload: BaseModel | dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
        deadline: float | None = None,
        attempt_seconds: float | None = None,
    ) -> httpx.Response:
        """Sends one request, again where that may help, and returns the successful response.

        ``deadline`` (all attempts) and ``attempt_seconds`` (one attempt) are in seconds; None takes the client's own.

        Raises:
            RequestRefusedError: the service refused it (4xx).
            DependencyLostError: it could not be reached or did not answer well within ``deadline`` seconds.
        """
        seconds = self.deadline if deadline is None else deadline
        patience = self.timeout if attempt_seconds is None else attempt_seconds
        content = None if payload is None else encode(payload)
        headers = None if content is None else {"Content-Type": "application/json"}
        started = time.monotonic()
        attempts, last_error = 0, "no answer"
        try:
            async with asyncio.timeout(seconds):
                async for attempt in stamina.retry_context(
                    on=_backoff, attempts=None, timeout=seconds, wait_initial=0.1, wait_max=5.0, wait_jitter=0.2
                ):
                    with attempt:
                        attempts = attempt.num
                        if attempts > 1:
                            self._retries.inc()
                        try:
                            response = await self._http.request(
                                method,
                                path,
                                content=content,
                                headers=headers,
                                params=params,
                                timeout=_timeout(patience),
                            )
                            return self._check(response)
                        except (_RetryableStatusError, *_RETRIED_ERRORS) as error:
                            last_error = describe(error)
                            raise
        except (TimeoutError, _RetryableStatusError, *_RETRIED_ERRORS) as error:
            spent = time.monotonic() - started
            raise DependencyLostError(
                f"{self.service} did not answer {method} {self.base_url}{path} within {spent:.1f} s "
                f"and {attempts} tries: {last_error}"
            ) from error
        raise AssertionError("stamina returned without an attempt that succeeded or raised")

    async def ask_once(self, path: str, seconds: float) -> httpx.Response:
        """One GET, without retries, whatever status it is answered with: for those who ask again anyway.

        Raises:
            DependencyLostError: there was no answer within ``seconds``.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._http.get(path, timeout=_timeout(seconds))
        except (TimeoutError, *_RETRIED_ERRORS) as error:
            raise DependencyLostError(
                f"{self.service} at {self.base_url} did not answer within {seconds:g} s: {describe(error)}"
            ) from error

    async def wait_healthy(self, deadline_seconds: float) -> None:
        """Polls GET /health until it answers 200.

        Raises:
            DependencyLostError: not within ``deadline_seconds``; the message has the last state seen.
        """
        started = time.monotonic()
        pause, seen = 0.05, "no answer"
        while True:
            left = deadline_seconds - (time.monotonic() - started)
            if left <= 0:
                raise DependencyLostError(
                    f"{self.service} at {self.base_url} is not healthy after {deadline_seconds:g} s: "
                    f"{seen}; see its log"
                )
            try:
                response = await self._http.get("/health", timeout=min(5.0, left))
                if response.status_code == 200:
                    return
                seen = f"/health answered {response.status_code} {response.text[:200]}"
            except _RETRIED_ERRORS as error:
                seen = describe(error)
            await asyncio.sleep(min(pause, max(0.0, left)))
            pause = min(pause * 1.5, 1.0)

    def _check(self, response: httpx.Response) -> httpx.Response:
        status = response.status_code
        if status < 300:
            return response
        if status in _RETRIED_STATUS:
            raise _RetryableStatusError(response)
        detail = problem_detail(response)
        if status >= 500:
            raise DependencyLostError(f"{self.service} failed on {response.url}: {status} {detail}")
        raise RequestRefusedError(self.service, str(response.url), status, detail)

    def _parse(self, response: httpx.Response, reply_model: type[Reply]) -> Reply:
        try:
            return reply_model.model_validate_json(response.content)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise DependencyLostError(
                f"{self.service} answered {response.url} with something else than a {reply_model.__name__} "
                f"({where}: {first['msg']}); is another program or version listening there?"
            ) from error


def transport(limits: httpx.Limits) -> httpx.AsyncHTTPTransport:
    """Connections that end GIVEN_UP_SECONDS after the other side fell silent, where the system can tell."""
    options = [
        # macOS calls the first by another name; the last is for what was sent and never acknowledged.
        ("TCP_KEEPIDLE", SILENCE_SECONDS),
        ("TCP_KEEPALIVE", SILENCE_SECONDS),
        ("TCP_KEEPINTVL", PROBE_SECONDS),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", GIVEN_UP_SECONDS * 1000),
    ]
    return httpx.AsyncHTTPTransport(
        limits=limits,
        trust_env=False,
        socket_options=[
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in options if hasattr(socket, name)),
        ],
    )


def _timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds), pool=None)


def encode(payload: BaseModel | dict[str, Any]) -> bytes:
    """A payload as JSON."""
    if isinstance(payload, BaseModel):
        return payload.__pydantic_serializer__.to_json(payload)
    return orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)


def problem_detail(response: httpx.Response) -> str:
    """What a refusal says: the problem document's detail, else the beginning of the body."""
    try:
        document = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        document = None
    if isinstance(document, dict) and isinstance(document.get("detail"), str):
        return str(document["detail"])
    return response.text[:300] or response.reason_phrase


def describe(error: BaseException) -> str:
    """An error in words; many of httpx's have no text of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _backoff(error: Exception) -> bool | float:
    """Tells stamina whether to try again, and after how many seconds where the service said so."""
    if isinstance(error, _RetryableStatusError):
        return True if error.retry_after is None else error.retry_after
    return isinstance(error, _RETRIED_ERRORS)


def _seconds(text: str | None) -> float | None:
    # The other form of Retry-After, a date, is not one that our services use.
    return min(float(text), 30.0) if text is not None and text.isdecimal() else None
