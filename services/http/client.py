"""The HTTP client of all clients: JSON with a token, deadlines, and retries that are bounded and counted.

The client repeats a request if the service could not be reached, did not answer in time, or answered that it cannot
serve now (429, 502, 503, 504); repeating a request does no harm on any route of the services. Every other answer is
final. Only the deadline bounds the attempts, so that a node has that long to come back, however quickly each attempt
fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import socket
import ssl
import time
from collections import Counter
from typing import Any, ClassVar, Self, TypedDict, TypeVar, Unpack

import httpx
import orjson
import stamina
from prometheus_client import Counter as Metric
from pydantic import BaseModel, ValidationError

from services.core import endpoints
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.protocol.base import ComponentRecord

log = get_logger(__name__)


# Instead of stamina's line at each attempt, the client logs the first in its own words.
stamina.instrumentation.set_on_retry_hooks([stamina.instrumentation.PrometheusOnRetryHook])

Reply = TypeVar("Reply", bound=BaseModel)

RETRIES = Metric("client_retries", "Requests that were tried again.", ["service"])

KEEP_ALIVE_SECONDS = 5.0
"""Connections that idled longer are closed: each new connection resolves the name again, so that the client finds a
node that was recovered under another address."""
CONNECT_SECONDS = 5.0
POOL_REQUESTS = 16
PROBE_SECONDS = 5.0
"""Longest wait for an answer of /health."""
MAX_REPLY_BYTES = 2**30
LEAST_PROBE_SECONDS = 1.0
"""Shortest time of the last probe; a shorter one would replace the real cause by a time-out."""
HEALTH_POLL_SECONDS = 0.2
LONGEST_HEALTH_POLL_SECONDS = 2.0
"""The pause between probes grows to a tenth of the time waited, so that a hundred clients do not load a service that
takes long to start."""

SILENCE_SECONDS = 10
"""A destroyed node leaves its connections open, and a client could wait for minutes for its answer. So the system
probes the other side after this silence, and closes the connection if no probe is answered."""
KEEPALIVE_PROBE_SECONDS = 5
KEEPALIVE_PROBES = 3
SILENT_PEER_SECONDS = SILENCE_SECONDS + KEEPALIVE_PROBES * KEEPALIVE_PROBE_SECONDS

MAX_RETRY_AFTER_SECONDS = 30.0

_RETRIED_STATUS = frozenset({429, 502, 503, 504})
_RETRIED_ERRORS = (httpx.TimeoutException, httpx.NetworkError, httpx.ProtocolError, httpx.ProxyError)


Payload = BaseModel | dict[str, Any] | bytes | None


class RequestOptions(TypedDict, total=False):
    """What a request has besides its path and its body; None as if it were not given."""

    params: dict[str, Any] | None
    headers: dict[str, str] | None
    deadline: float | None
    """Seconds for all attempts, in place of the client's."""
    attempt_seconds: float | None
    """Seconds that one attempt may take between bytes, in place of the client's."""


class RequestRefusedError(Exception):
    """A service refused a request (4xx); ``detail`` is the detail of its problem document."""

    def __init__(self, service: str, url: str, status: int, detail: str) -> None:
        super().__init__(f"{service} refused {url}: {status} {detail}")
        self.service = service
        self.status = status
        self.detail = detail


class Pools(httpx.AsyncBaseTransport):
    """Any number of connections, in pools of about POOL_REQUESTS.

    For each request httpcore looks at every connection of its pool, and at every pair of idle ones. With a thousand
    connections in one pool that takes tens of milliseconds.
    """

    def __init__(self, url: str) -> None:
        """Make pools of connections to the server of ``url``."""
        self._url = url
        self._requests: Counter[httpx.AsyncHTTPTransport] = Counter()
        """The number of requests under way in each pool."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request through the least busy pool; a new one if all are full."""
        pool = min(self._requests, key=self._requests.__getitem__, default=None)
        if pool is None or self._requests[pool] >= POOL_REQUESTS:
            pool = pool_for(self._url, None)
        self._requests[pool] += 1
        try:
            return await pool.handle_async_request(request)
        finally:
            self._requests[pool] -= 1

    async def aclose(self) -> None:
        """Close all connections."""
        for pool in self._requests:
            await pool.aclose()


def pool_for(url: str, max_connections: int | None) -> httpx.AsyncHTTPTransport:
    """Return a pool of connections to the server of ``url``, through the environment's proxy for it.

    Raises:
        ConfigurationError: the proxy cannot be used.
    """
    proxy = endpoints.proxy_of(url)
    # Nothing within a job group is encrypted, so that a wrong SSL_CERT_FILE must not keep it from starting.
    needs_certificates = proxy is not None or not url.startswith("http://")
    try:
        return httpx.AsyncHTTPTransport(
            verify=needs_certificates and ssl_context(),
            limits=httpx.Limits(max_connections=max_connections, keepalive_expiry=KEEP_ALIVE_SECONDS),
            proxy=proxy and httpx.Proxy(proxy, ssl_context=ssl_context() if proxy.startswith("https://") else None),
            trust_env=False,
            socket_options=_socket_options(),
        )
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ConfigurationError(
            f"{url} cannot be reached through the proxy {without_password(proxy)} of the environment: {error}; give "
            "another one, or add the host to NO_PROXY"
        ) from error


class HttpClient:
    """Requests to one service. An async context manager, used within one event loop."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 30.0,
        service: str = "service",
        deadline: float = 90.0,
        max_connections: int | None = 256,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        """Make a client.

        Args:
            url: the service's base URL, such as ``http://reward-server-0.group:8002``.
            token: sent as ``Authorization: Bearer``.
            timeout: seconds that one attempt may take between bytes.
            service: the service's name in errors and metrics.
            deadline: seconds that a request may take with all its attempts, unless the call gives another deadline.
            max_connections: open at once; further requests wait for one. None: unlimited.
            max_reply_bytes: a longer reply is an error.
        """
        self.service = service
        self.url = url.rstrip("/")
        self.token = token
        self.timeout = timeout
        self.deadline = deadline
        self.max_reply_bytes = max_reply_bytes
        self._retries = RETRIES.labels(service)
        proxy = endpoints.proxy_of(self.url)
        self._via = f" through the proxy {without_password(proxy)}" if proxy else ""
        self._place = f"{service} at {without_password(self.url)}{self._via}"
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else None,
            transport=Pools(self.url) if max_connections is None else pool_for(self.url, max_connections),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def call(
        self,
        method: str,
        path: str,
        reply_model: type[Reply],
        payload: Payload = None,
        **options: Unpack[RequestOptions],
    ) -> Reply:
        """Send a request as ``request`` does, and return the reply as a ``reply_model``.

        Raises:
            RequestRefusedError: the service refused the request (4xx).
            DependencyLostError: the service did not answer well within its deadline, or with another reply.
        """
        response = await self.request(method, path, payload, **options)
        try:
            return self.read(response, reply_model)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise DependencyLostError(
                f"{self.service} answered {response.url} with something other than a {reply_model.__name__} "
                f"({where}: {first['msg']}); is another program or version listening there?"
            ) from error

    def read(self, response: httpx.Response, reply_model: type[Reply]) -> Reply:
        """Return a reply in its type; raises ValidationError for another reply."""
        return reply_model.model_validate_json(response.content)

    async def request(
        self, method: str, path: str, payload: Payload = None, **options: Unpack[RequestOptions]
    ) -> httpx.Response:
        """Send a request, repeat it where that may help, and return the successful response.

        Raises:
            RequestRefusedError: the service refused the request (4xx).
            DependencyLostError: the service could not be reached or did not answer well within its deadline.
        """
        seconds, patience = options.get("deadline"), options.get("attempt_seconds")
        request = self._build(method, path, payload, self.timeout if patience is None else patience, options)
        name = f"{method} {without_password(self.url)}{path}{self._via}"
        return await self._repeat(request, name, self.deadline if seconds is None else seconds)

    async def _repeat(self, request: httpx.Request, name: str, seconds: float) -> httpx.Response:
        """Send a request, called ``name`` in messages, again and again for ``seconds`` until an attempt succeeds."""
        started = time.monotonic()
        attempts, last_error = 0, "no answer"
        cause: Exception | None = None
        try:
            async with asyncio.timeout(seconds):
                async for attempt in stamina.retry_context(
                    on=_backoff, attempts=None, timeout=seconds, wait_initial=0.1, wait_max=5.0, wait_jitter=0.2
                ):
                    with attempt:
                        attempts = attempt.num
                        if attempts > 1:
                            self._retries.inc()
                        if attempts == 2:
                            log.warning("a request is tried again", request=name, why=last_error)
                        try:
                            return (await self._attempt(request)).raise_for_status()
                        except httpx.HTTPError as error:
                            last_error, cause = describe(error), error
                            raise
        except (TimeoutError, httpx.HTTPError) as error:
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in _RETRIED_STATUS:
                status, detail, url = error.response.status_code, problem_detail(error.response), error.response.url
                if status < 500:
                    raise RequestRefusedError(self.service, str(url), status, detail) from None
                raise DependencyLostError(f"{self.service} failed on {url}: {status} {detail}") from None
            raise DependencyLostError(
                f"{self.service} did not answer {name} within {time.monotonic() - started:.1f} s and {attempts} tries: "
                f"{last_error}"
            ) from (cause or error)
        raise AssertionError("stamina returned without an attempt that succeeded or raised")

    async def send_once(self, method: str, path: str, payload: Payload = None, *, seconds: float) -> httpx.Response:
        """Send a request without retries and return the response of any status.

        Raises:
            DependencyLostError: no answer came within ``seconds``.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._attempt(self._build(method, path, payload, seconds, {}))
        except (TimeoutError, httpx.HTTPError) as error:
            raise DependencyLostError(
                f"{self._place} did not answer {path} within {seconds:g} s: {describe(error)}"
            ) from error

    async def _attempt(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read its reply; DependencyLostError if that is too long."""
        async with contextlib.aclosing(await self._http.send(request, stream=True)) as response:
            content = bytearray()
            async for part in response.aiter_bytes():
                content += part
                if len(content) > self.max_reply_bytes:
                    raise DependencyLostError(
                        f"{self.service} answered {request.url} with more than the {self.max_reply_bytes} bytes that "
                        "are read; is another program listening there?"
                    )
            response._content = bytes(content)  # as httpx keeps what it has read itself
        return response

    async def is_healthy(self) -> bool:
        """Return whether the service answers GET /health with 200 now."""
        try:
            return (await self.send_once("GET", "/health", seconds=PROBE_SECONDS)).status_code == 200
        except DependencyLostError:
            return False

    async def wait_healthy(self, deadline_seconds: float) -> None:
        """Wait until GET /health answers 200.

        Raises:
            DependencyLostError: it did not within ``deadline_seconds``; the message has the last state seen.
        """
        started, last_state = time.monotonic(), "no answer"
        while (remaining := started + deadline_seconds - time.monotonic()) > 0:
            try:
                response = await self.send_once(
                    "GET", "/health", seconds=min(PROBE_SECONDS, max(remaining, LEAST_PROBE_SECONDS))
                )
                if response.status_code == 200:
                    return
                last_state = f"/health answered {response.status_code} {text_of(response)[:200]}"
            except DependencyLostError as error:
                last_state = str(error)
            pause = min(max(HEALTH_POLL_SECONDS, (time.monotonic() - started) / 10), LONGEST_HEALTH_POLL_SECONDS)
            await asyncio.sleep(min(pause, remaining))
        state = f"{last_state}; see its log"
        raise DependencyLostError(f"{self._place} is not healthy after {deadline_seconds:g} s: {state}")

    def _build(
        self, method: str, path: str, payload: Payload, seconds: float, options: RequestOptions
    ) -> httpx.Request:
        is_json = {} if payload is None else {"Content-Type": "application/json"}
        return self._http.build_request(
            method,
            path,
            content=payload if payload is None or isinstance(payload, bytes) else _encode(payload),
            headers=is_json | (options.get("headers") or {}),
            params=options.get("params"),
            timeout=httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds), pool=None),
        )


def problem_detail(response: httpx.Response) -> str:
    """Return the detail of a problem document; of another body, its beginning."""
    text = text_of(response)
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        document = None
    if isinstance(document, dict) and isinstance(document.get("detail"), str):
        return str(document["detail"])
    return text[:300] or response.reason_phrase


def text_of(response: httpx.Response) -> str:
    """Return the text of a reply for messages, without the key that the request had and that some servers repeat."""
    key = ""
    with contextlib.suppress(RuntimeError):  # the response has no request
        key = response.request.headers.get("Authorization", "").removeprefix("Bearer ")
    return response.text.replace(key, "***") if key else response.text


def describe(error: BaseException) -> str:
    """Return an error's type and text, if it has one; for a refused request, its status and detail."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"{error.response.status_code} {problem_detail(error.response)}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for an entry of getaddrinfo that closes SILENT_PEER_SECONDS after the other side fell silent."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    for level, name, value in _socket_options():
        opened.setsockopt(level, name, value)
    return opened


def _socket_options() -> list[tuple[int, int, int]]:
    """Return the options by which a connection closes SILENT_PEER_SECONDS after silence, where the system has them."""
    options = [
        # macOS calls the first by another name; the last is for data that was sent and never acknowledged.
        ("TCP_KEEPIDLE", SILENCE_SECONDS),
        ("TCP_KEEPALIVE", SILENCE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_PROBE_SECONDS),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", SILENT_PEER_SECONDS * 1000),
    ]
    supported = [(socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in options if hasattr(socket, name)]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *supported]


@functools.cache
def ssl_context() -> ssl.SSLContext:
    """Return the context of all clients, since reading the certificates takes tens of milliseconds.

    Raises:
        ConfigurationError: SSL_CERT_FILE cannot be read.
    """
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise ConfigurationError(
            f"SSL_CERT_FILE={os.environ.get('SSL_CERT_FILE')} has no certificates that can be read: {error}; name a "
            "file of certificates in PEM, or unset it"
        ) from error


def without_password(url: str | None) -> str | None:
    """Return a URL for messages, without the name and password that it may have."""
    return url and re.sub(r"//[^/]*@", "//", url)


def _encode(payload: BaseModel | dict[str, Any]) -> bytes:
    if isinstance(payload, BaseModel):
        return payload.__pydantic_serializer__.to_json(payload)
    return orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)


def _backoff(error: Exception) -> bool | float:
    """Tell stamina whether to try again: True, or the seconds to wait if the service gave them."""
    if not isinstance(error, httpx.HTTPStatusError):
        return isinstance(error, _RETRIED_ERRORS)
    # Retry-After may be a date, too, which our services never send.
    after = error.response.headers.get("Retry-After", "")
    wait = min(float(after), MAX_RETRY_AFTER_SECONDS) if after.isdecimal() else True
    return error.response.status_code in _RETRIED_STATUS and wait


class ServiceClient(HttpClient):
    """A client of one service of the job group."""

    task: ClassVar[endpoints.Task]

    def __init__(
        self,
        endpoint: endpoints.Endpoint | str | None = None,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        deadline: float = 90.0,
    ) -> None:
        """Make a client of the service at ``endpoint``, an address or a URL, by default the job group's.

        ``timeout`` is for one attempt and ``deadline`` for a call with all its attempts, both in seconds.
        """
        url = endpoint if isinstance(endpoint, str) else (endpoint or endpoints.endpoint(self.task)).url
        super().__init__(url, token=token, timeout=timeout, service=self.task.value, deadline=deadline)

    async def settings(self) -> ComponentRecord:
        """Return the service's record of its settings, commit and packages."""
        return await self.call("GET", "/settings", ComponentRecord)
