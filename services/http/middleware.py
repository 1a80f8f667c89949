"""The middleware of all services."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Collection

from prometheus_client import Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.core.logs import get_logger
from services.http.problems import ProblemError, printable, problem_response

log = get_logger(__name__)

REQUESTS = Counter("http_requests", "Requests answered.", ["service", "method", "route", "status"])
DURATION = Histogram(
    "http_request_duration_seconds",
    "Time from a request's headers to the end of its response.",
    ["service", "route"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
IN_FLIGHT = Gauge("http_requests_in_flight", "Requests being answered.", ["service"])
BODY = Counter("http_request_body_bytes", "Bytes of request bodies read.", ["service"])

MAX_BODY_BYTES = 64 * 2**20
MAX_BODY_SECONDS = 60.0

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_ALWAYS_ANSWERED = frozenset({"/health", "/metrics", "/openapi.json", "/docs"})
"""Paths that are answered before the service is ready. Only /health and pages without data need no token."""


class ServiceMiddleware:
    """ASGI middleware around a whole service: metrics, the token, readiness, and limits to the body of a request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        service: str,
        token: str | None,
        is_ready: Callable[[], bool],
        public: Collection[str] = (),
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._app = app
        self._without_token = frozenset({"/health", *public})
        self._always_answered = _ALWAYS_ANSWERED | self._without_token
        self._service = service
        self._expected = f"Bearer {token}".encode() if token else None
        self._is_ready = is_ready
        self._max_body_bytes = max_body_bytes
        self._in_flight = IN_FLIGHT.labels(service)
        self._body_bytes = BODY.labels(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; pass other connections (WebSocket, lifespan) through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def count_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._in_flight.inc()
        try:
            await self._answer(scope, receive, count_and_send)
        except ProblemError as error:
            refusal = problem_response(error.status_code, error.detail, headers=error.headers)
            await refusal(scope, receive, count_and_send)
        # An error that a route lets through is a bug of ours: log its traceback, and answer 500.
        except Exception as error:
            log.exception("request failed", method=scope["method"], path=printable(scope["path"]), error=repr(error))
            if status:
                raise
            refusal = problem_response(500, f"{type(error).__name__} in {self._service}; its log has the traceback")
            await refusal(scope, receive, count_and_send)
        finally:
            self._in_flight.dec()
            path = getattr(scope.get("route"), "path", None) or "unmatched"
            method = scope["method"] if scope["method"] in _METHODS else "other"
            REQUESTS.labels(self._service, method, path, str(status or 499)).inc()
            DURATION.labels(self._service, path).observe(time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        self._check(scope["path"], headers)
        if b"content-length" in headers or b"transfer-encoding" in headers:
            body = await self._read(receive)
            if body is None:
                return
            self._body_bytes.inc(len(body))
            receive = _replay(body, receive)
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Raise ProblemError without the token, while the service is not ready, or for a body that is too large."""
        if self._expected is not None and path not in self._without_token:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                detail = "JOBGROUP_TOKEN is set here: send the header 'Authorization: Bearer <token>' with its value"
                raise ProblemError(401, detail, {"WWW-Authenticate": "Bearer"})
        if path not in self._always_answered and not self._is_ready():
            detail = f"{self._service} is starting or stopping; wait until GET /health answers 200"
            raise ProblemError(503, detail, {"Retry-After": "1"})
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            raise self._too_large(length.decode("latin-1"))

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the whole body, or None when the client left.

        Raises:
            ProblemError: the body is too large, or did not arrive in time.
        """
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(MAX_BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > self._max_body_bytes:
                        raise self._too_large(f"more than {self._max_body_bytes}")
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            detail = f"the body did not arrive within {MAX_BODY_SECONDS:g} s"
            raise ProblemError(408, detail, {"Connection": "close"}) from None

    def _too_large(self, size: str) -> ProblemError:
        detail = f"the body has {size} bytes; allowed are {self._max_body_bytes}: send less at a time"
        # The rest of the body is not read, so the connection cannot be used again.
        return ProblemError(413, detail, {"Connection": "close"})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives a body that was read already, and then the messages after it (a disconnect)."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
