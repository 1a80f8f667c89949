"""The middleware of all services."""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import lru_cache
from ipaddress import ip_address

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
        own_keys: re.Pattern[str] | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._app = app
        self._without_token = frozenset({"/health", *public})
        self._always_answered = _ALWAYS_ANSWERED | self._without_token
        self._service = service
        self._own_keys = own_keys
        self._expected = f"Bearer {token}".encode() if token else None
        self._is_ready = is_ready
        self._max_body_bytes = max_body_bytes
        self._in_flight = IN_FLIGHT.labels(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; pass other connections (WebSocket, lifespan) through."""
        if scope["type"] != "http":
            if scope["type"] == "websocket" and self._expected is None and not _is_from_here(dict(scope["headers"])):
                await send({"type": "websocket.close"})
            else:
                await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        path = printable(scope["path"])
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
            refusal = problem_response(
                error.status_code, error.detail, instance=path, headers=error.headers, **error.members
            )
            await refusal(scope, receive, count_and_send)
        # An error that a route lets through is a bug of ours: log its traceback, and answer 500.
        except Exception as error:
            log.exception("request failed", method=scope["method"], path=path, error=repr(error))
            if status:
                raise
            detail = f"{type(error).__name__} in {self._service}; its log has the traceback"
            refusal = problem_response(500, detail, instance=path)
            await refusal(scope, receive, count_and_send)
        finally:
            self._in_flight.dec()
            route = getattr(scope.get("route"), "path", None) or "unmatched"
            method = scope["method"] if scope["method"] in _METHODS else "other"
            REQUESTS.labels(self._service, method, route, str(status or 499)).inc()
            DURATION.labels(self._service, route).observe(time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check(scope["path"], dict(scope["headers"]))
        await self._app(scope, self._bounded(receive), send)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Raise ProblemError without the token, while the service is not ready, or for a body that is too large."""
        has_own_key = self._own_keys is not None and self._own_keys.fullmatch(path)
        if path in self._without_token or has_own_key:
            pass
        elif self._expected is not None:
            authorization = headers.get(b"authorization", b"")
            if not hmac.compare_digest(authorization, self._expected):
                detail = "JOBGROUP_TOKEN is set here: send the header 'Authorization: Bearer <token>' with its value"
                raise ProblemError(401, detail, {"WWW-Authenticate": "Bearer"})
        elif not is_ours(headers.get(b"host", b"")):
            detail = (
                "public names are answered with JOBGROUP_TOKEN only; set it, or give an address in place of the name"
            )
            raise ProblemError(421, detail)
        if path not in self._always_answered and not self._is_ready():
            detail = f"{self._service} is starting or stopping; wait until GET /health answers 200"
            raise ProblemError(503, detail, {"Retry-After": "1"})
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            raise self._too_large(length.decode("latin-1"))

    def _bounded(self, receive: Receive) -> Receive:
        """Return a ``receive`` that raises ProblemError if the body is too large or does not arrive in time."""
        deadline: float | None = asyncio.get_running_loop().time() + MAX_BODY_SECONDS
        size = 0

        async def bounded() -> Message:
            nonlocal deadline, size
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                detail = f"the body did not arrive within {MAX_BODY_SECONDS:g} s"
                raise ProblemError(408, detail, {"Connection": "close"}) from None
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                raise self._too_large(f"more than {self._max_body_bytes}")
            if not message.get("more_body", False):
                # The next message is the client's disconnection, which may come at any time.
                deadline = None
            return message

        return bounded

    def _too_large(self, size: str) -> ProblemError:
        detail = f"the body has {size} bytes; allowed are {self._max_body_bytes}: send less at a time"
        # The rest of the body is not read, so the connection cannot be used again.
        return ProblemError(413, detail, {"Connection": "close"})


def _is_from_here(headers: dict[bytes, bytes]) -> bool:
    """Return whether a WebSocket is opened by no web page of another site, which browsers allow, and name the site."""
    return is_ours(headers.get(b"host", b"")) and is_ours(headers.get(b"origin", b"").rpartition(b"//")[2])


@lru_cache(maxsize=256)
def is_ours(host: bytes) -> bool:
    """Return whether a Host header has an address, or a name that no web site can have lead here (DNS rebinding).

    Such a name has no dot, ends as public names never do, or belongs to this machine or its job group.
    """
    text = host.decode("latin-1").lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0].rstrip(".")
    with suppress(ValueError):
        ip_address(name)
        return True
    group = os.environ.get("SKYPILOT_JOBGROUP_NAME", "")
    ends = (".localhost", ".local", ".internal", ".svc", *([f".{group.lower()}"] if group else []))
    return "." not in name or name.endswith(ends) or name == socket.gethostname().lower()
