"""The application factory of all services: common routes, problem documents, the middleware, and the lifecycle.

A service is starting while its lifespan loads, then it serves, and then it drains until the process ends. The port is
open while the lifespan loads: /health answers 503 "starting" and every other route 503, so that callers need not guess
how long to wait. On SIGTERM or SIGINT a service says "draining", finishes the requests in flight, refuses new requests,
and exits with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import inspect
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import lru_cache
from importlib import metadata
from ipaddress import ip_address
from typing import Any

import prometheus_client
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.core import logs
from services.core.settings import Settings
from services.http import problems, provenance
from services.http.json_body import JsonRoute, model_response
from services.http.problems import ProblemError, printable, problem_response
from services.protocol.base import ComponentRecord, Health

log = logs.get_logger(__name__)

MAX_BODY_BYTES = 64 * 2**20
MAX_BODY_SECONDS = 60.0

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[Any]]
Stats = Mapping[str, Any]

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no annotation there


def version() -> str:
    """Return this project's installed version."""
    return metadata.version("skypilot-grpo")


def create_service_app(
    service: str,
    *,
    settings: Settings,
    lifespan: Lifespan,
    health: Callable[[], Health] | None = None,
    stats: Callable[[], Stats | Awaitable[Stats]] | None = None,
    description: str = "",
    public: Collection[str] = (),
    own_keys: re.Pattern[str] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """Make an application with /health, /metrics, /stats, /settings, /openapi.json, /docs, and ServiceMiddleware.

    Args:
        service: the service's name, such as ``data-server``; also the ``service`` label of its metrics.
        settings: shown at /settings; the token is read from them.
        lifespan: loads the service's data in the background while the port is open; the service is ready once it is
            entered. Blocking work in it needs services.core.tasks.in_background.
        health: returns the state while the service is ready; None: healthy.
        stats: returns the content of GET /stats, plain data; may be a coroutine function.
        description: shown on the OpenAPI page.
        public: paths of pages without data, which a browser may load before it has the token.
        own_keys: matches whole paths whose routes check a key of their own instead of the token.
        max_body_bytes: larger bodies are refused with 413.
    """
    lifecycle = Lifecycle()
    app = FastAPI(
        title=service,
        version=version(),
        description=description,
        lifespan=background_lifespan(lifespan, lifecycle),
        responses=problems.PROBLEM_RESPONSES,
        redoc_url=None,
    )
    app.router.route_class = JsonRoute
    app.state.lifecycle = lifecycle
    problems.install(app)
    _add_common_routes(app, settings, lifecycle, health, stats)
    app.add_middleware(
        ServiceMiddleware,
        service=service,
        token=settings.token,
        is_ready=lambda: lifecycle.is_serving,
        public=public,
        own_keys=own_keys,
        max_body_bytes=max_body_bytes,
    )
    return app


def _add_common_routes(
    app: FastAPI,
    settings: Settings,
    lifecycle: Lifecycle,
    health: Callable[[], Health] | None,
    stats: Callable[[], Stats | Awaitable[Stats]] | None,
) -> None:
    service = app.title

    def current_health() -> Health:
        if lifecycle.draining.is_set():
            return Health(status="draining", service=service)
        if not lifecycle.is_serving:
            return Health(status="starting" if lifecycle.failure is None else "unhealthy", service=service)
        return Health(status="healthy", service=service) if health is None else health()

    @app.get(
        "/health",
        tags=["common"],
        response_model=Health,
        responses={503: {"description": "Not ready, or not any more.", "model": Health}},
    )
    async def get_health() -> Response:
        """Return 200 when the service answers requests, 503 while it starts, drains or is unhealthy. Needs no token."""
        now = current_health()
        return model_response(now, 200 if now.status == "healthy" else 503)

    @app.get("/metrics", tags=["common"], responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def get_metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(
            prometheus_client.generate_latest(prometheus_client.REGISTRY),
            media_type=prometheus_client.CONTENT_TYPE_LATEST,
        )

    @app.get("/stats", tags=["common"])
    async def get_stats() -> dict[str, Any]:
        """Return the service's statistics."""
        content = stats() if stats is not None else {}
        return {"service": service, **(await content if inspect.isawaitable(content) else content)}

    @app.get("/settings", tags=["common"])
    async def get_settings() -> ComponentRecord:
        """Return the service's settings without secrets, the code's commit, and the versions of packages."""
        return await asyncio.to_thread(provenance.describe, settings)


class Lifecycle:
    """The state of a service between start and end. Routes find it as ``app.state.lifecycle``."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.draining = asyncio.Event()
        """Set at SIGTERM: a route that waits for something must stop waiting."""
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None

    @property
    def is_serving(self) -> bool:
        """True while requests reach the routes, also while draining."""
        return self.ready.is_set() and self.failure is None

    def fail(self, error: Exception) -> None:
        """End the service with the exit code that fits ``error``."""
        if self.failure is None:
            self.failure = error
            self.on_failure()


def background_lifespan(lifespan: Lifespan, lifecycle: Lifecycle) -> Lifespan:
    """Return a lifespan that enters ``lifespan`` in a task of its own and reports to ``lifecycle``."""

    @asynccontextmanager
    async def outer(app: FastAPI) -> AsyncIterator[None]:
        stop = asyncio.Event()

        async def live() -> None:
            try:
                async with lifespan(app):
                    _tune_garbage_collection()
                    lifecycle.ready.set()
                    log.info("ready")
                    await stop.wait()
            except Exception as error:  # noqa: BLE001  # raised by serve()
                lifecycle.fail(error)

        life = asyncio.create_task(live())
        try:
            yield
        finally:
            stop.set()
            if not lifecycle.ready.is_set():
                life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await life

    return outer


def _tune_garbage_collection() -> None:
    # The loaded data stays: frozen, it no longer makes full collections take tens of milliseconds. Requests make many
    # containers and hardly any cycles, so that larger collections may be rare; the smallest ones must stay short,
    # because every request in flight waits for them.
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 200, 50)


REQUESTS = prometheus_client.Counter("http_requests", "Requests answered.", ["service", "method", "route", "status"])
DURATION = prometheus_client.Histogram(
    "http_request_duration_seconds",
    "Time from a request's headers to the end of its response.",
    ["service", "route"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
IN_FLIGHT = prometheus_client.Gauge("http_requests_in_flight", "Requests being answered.", ["service"])

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
            self._check(scope["path"], dict(scope["headers"]))
            await self._app(scope, self._bounded(receive), count_and_send)
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
    with contextlib.suppress(ValueError):
        ip_address(name)
        return True
    group = os.environ.get("SKYPILOT_JOBGROUP_NAME", "")
    ends = (".localhost", ".local", ".internal", ".svc", *([f".{group.lower()}"] if group else []))
    return "." not in name or name.endswith(ends) or name == socket.gethostname().lower()
