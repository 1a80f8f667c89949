"""What every request passes before it reaches a route: measurement, readiness, the token, and limits on its body."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Callable, Collection
from itertools import accumulate
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
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
# Our deepest record has about ten levels; orjson itself refuses to write more than 254.
MAX_DEPTH = 64

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# Answered before the service is ready; only /health, and pages that contain no data, are answered without the token.
_ALWAYS = frozenset({"/health", "/metrics", "/openapi.json", "/docs"})
# Possessive, so linear on any input; an unterminated string swallows the rest.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def json_depth(body: bytes) -> int:
    """How deeply the arrays and objects of a JSON text are nested; 0 for a bare value. Linear in its length."""
    brackets = _STRINGS.sub(b"", body).translate(None, _NOT_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)


class JsonRequest(Request):
    """A request whose body is parsed by orjson, which refuses NaN, infinities, lone surrogates and invalid UTF-8."""

    async def json(self) -> Any:
        """The parsed body.

        Raises:
            ProblemError: it is nested more than MAX_DEPTH deep.
            orjson.JSONDecodeError: it is not JSON.
        """
        if not hasattr(self, "_json"):
            body = await self.body()
            if (depth := json_depth(body)) > MAX_DEPTH:
                raise ProblemError(400, f"the body is nested {depth} levels deep; allowed are {MAX_DEPTH}")
            self._json = orjson.loads(body)
        return self._json


class JsonRoute(APIRoute):
    """A route that reads its body as JsonRequest does."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """The handler that FastAPI calls."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            if self.body_field is not None and not _is_json(request.headers.get("content-type", "")):
                raise ProblemError(415, "send the body as JSON, with the header 'Content-Type: application/json'")
            response: Response = await handle(JsonRequest(request.scope, request.receive))
            return response

        return handler


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


class Gate:
    """ASGI middleware around a whole service."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        service: str,
        token: str | None,
        is_ready: Callable[[], bool],
        public: Collection[str] = (),
        max_body_bytes: int = MAX_BODY_BYTES,
        max_body_seconds: float = MAX_BODY_SECONDS,
    ) -> None:
        self._app = app
        self._without_token = frozenset({"/health", *public})
        self._always = _ALWAYS | self._without_token
        self._service = service
        self._expected = f"Bearer {token}".encode() if token else None
        self._is_ready = is_ready
        self._max_body_bytes = max_body_bytes
        self._max_body_seconds = max_body_seconds
        self._in_flight = IN_FLIGHT.labels(service)
        self._body_bytes = BODY.labels(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or passes anything but HTTP on."""
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
        # Whatever a route let through is a bug of ours: it is told to the client as a 500 and logged with its trace.
        except Exception as error:
            log.exception("request failed", method=scope["method"], path=printable(scope["path"]), error=repr(error))
            if status:
                raise
            refusal = problem_response(500, f"{type(error).__name__} in {self._service}; its log has the trace")
            await refusal(scope, receive, count_and_send)
        finally:
            self._in_flight.dec()
            path = getattr(scope.get("route"), "path", None) or "unmatched"
            method = scope["method"] if scope["method"] in _METHODS else "other"
            REQUESTS.labels(self._service, method, path, str(status or 499)).inc()
            DURATION.labels(self._service, path).observe(time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        refusal = self._refuse(scope, headers)
        if refusal is None and (b"content-length" in headers or b"transfer-encoding" in headers):
            body = await self._read(receive)
            if isinstance(body, Response):
                refusal = body
            elif body is None:
                return
            else:
                self._body_bytes.inc(len(body))
                receive = _replay(body, receive)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        path = scope["path"]
        if self._expected is not None and path not in self._without_token:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                detail = "JOBGROUP_TOKEN is set here: send the header 'Authorization: Bearer <token>' with its value"
                return problem_response(401, detail, headers={"WWW-Authenticate": "Bearer"})
        if path not in self._always and not self._is_ready():
            detail = f"{self._service} is starting or stopping; wait until GET /health answers 200"
            return problem_response(503, detail, headers={"Retry-After": "1"})
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            return self._too_large(length.decode("latin-1"))
        return None

    def _too_large(self, size: str) -> Response:
        detail = f"the body has {size} bytes; allowed are {self._max_body_bytes}: send less at a time"
        # The rest of the body is not read, so the connection cannot be used again.
        return problem_response(413, detail, headers={"Connection": "close"})

    async def _read(self, receive: Receive) -> bytes | Response | None:
        """The whole body, a refusal, or None when the client left."""
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._max_body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > self._max_body_bytes:
                        return self._too_large(f"more than {self._max_body_bytes}")
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            detail = f"the body did not arrive within {self._max_body_seconds:g} s"
            return problem_response(408, detail, headers={"Connection": "close"})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives a body which was read already, then what comes after it (the disconnect)."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
