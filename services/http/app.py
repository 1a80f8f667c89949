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
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import metadata
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, disable_created_metrics, generate_latest

from services.core import logs
from services.core.settings import Settings
from services.http import problems, provenance
from services.http.json_body import JsonRoute, model_response
from services.http.middleware import MAX_BODY_BYTES, ServiceMiddleware
from services.protocol.base import ComponentRecord, Health

log = logs.get_logger(__name__)

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
Stats = Mapping[str, Any]

disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no annotation there


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
    _complete_openapi(app, asks_token=settings.token is not None)
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
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats", tags=["common"])
    async def get_stats() -> dict[str, Any]:
        """Return the service's statistics."""
        content = stats() if stats is not None else {}
        return {"service": service, **(await content if inspect.isawaitable(content) else content)}

    @app.get("/settings", tags=["common"])
    async def get_settings() -> ComponentRecord:
        """Return the service's settings without secrets, the code's commit, and the versions of packages."""
        return await asyncio.to_thread(provenance.describe, settings)


def _complete_openapi(app: FastAPI, *, asks_token: bool) -> None:
    """Add the token, which FastAPI does not know of, to the OpenAPI page."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        if asks_token:
            document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"token": []}]
            document["paths"]["/health"]["get"]["security"] = []
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI documents replacing it


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
