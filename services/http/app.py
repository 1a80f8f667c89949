"""What all services share: the application with its common routes, its life from start to drain, the command line.

A service gives ``create_app`` a lifespan that loads what it needs. The port is open meanwhile: /health answers 503
"starting" and everything else 503, so that nobody needs to guess how long to wait. On SIGTERM or SIGINT a service
says "draining", ends the requests it has, refuses new ones, and exits with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import metadata
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, disable_created_metrics, generate_latest
from pydantic import BaseModel

from services.core import logs
from services.core.settings import Settings
from services.http import middleware, problems, provenance
from services.protocol import ComponentRecord, Health, Problem

T = TypeVar("T")
Stats = Mapping[str, Any]

log = logs.get_logger(__name__)

disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no annotation there

# A request that is being answered may take this long after SIGTERM; well below the 10 s that callers allow.
DRAIN_SECONDS = 5


def version() -> str:
    """The version of this project as installed."""
    return metadata.version("skypilot-grpo")


class JsonResponse(Response):
    """A reply written by orjson: numpy arrays as they are, NaN never (orjson writes null, so none may occur)."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of ``content``."""
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def model_response(model: BaseModel, status: int = 200) -> Response:
    """A reply from a model that is valid already: serialised once, not validated again."""
    return Response(model.__pydantic_serializer__.to_json(model), status, media_type="application/json")


class Lifecycle:
    """Where a service stands between start and end. Routes find it as ``app.state.lifecycle``."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.draining = asyncio.Event()
        """Set at SIGTERM: a route that waits for something should stop waiting."""
        self.ended = asyncio.Event()
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None

    @property
    def is_serving(self) -> bool:
        """Whether requests reach the routes; those in flight while draining do."""
        return self.ready.is_set() and self.failure is None

    def fail(self, error: Exception) -> None:
        """Ends the service with the exit code that fits ``error``."""
        if self.failure is None:
            self.failure = error
            self.on_failure()

    async def wait_ready(self) -> None:
        """Returns when the service is ready.

        Raises:
            Exception: whatever the start failed with.
        """
        ready, ended = asyncio.ensure_future(self.ready.wait()), asyncio.ensure_future(self.ended.wait())
        await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        ended.cancel()
        if self.failure is not None:
            raise self.failure


def create_service_app(
    service: str,
    *,
    settings: Settings,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    health: Callable[[], Health] | None = None,
    stats: Callable[[], Stats | Awaitable[Stats]] | None = None,
    version: str | None = None,
    description: str = "",
    public: Collection[str] = (),
    max_body_bytes: int = middleware.MAX_BODY_BYTES,
) -> FastAPI:
    """An application with /health, /metrics, /stats, /settings, /openapi.json and /docs, problems, token and limits.

    Args:
        service: its name, such as ``data-server``; also the ``service`` label of its metrics.
        settings: the token is read from it.
        lifespan: entered in the background after the port is open; the service is ready once it is entered. Blocking
            work in it belongs into ``in_background``.
        health: asked while the service is ready; None says healthy.
        stats: the content of GET /stats, plain data; may be a coroutine function.
        version: of the service; default this project's.
        description: shown on the OpenAPI page.
        public: paths of pages that contain no data, which a browser may load before it has been given the token.
        max_body_bytes: larger bodies get 413.
    """
    lifecycle = Lifecycle()
    app = FastAPI(
        title=service,
        version=version or metadata.version("skypilot-grpo"),
        description=description,
        lifespan=_background_lifespan(lifespan, lifecycle),
        responses=problems.PROBLEM_RESPONSES,
        redoc_url=None,
    )
    app.router.route_class = middleware.JsonRoute
    app.state.lifecycle = lifecycle
    app.state.service = service
    problems.install(app)
    _add_common_routes(app, service, lifecycle, health, stats)
    _add_settings_route(app, settings)
    _describe(app, asks_token=settings.token is not None)
    app.add_middleware(
        middleware.Gate,
        service=service,
        token=settings.token,
        is_ready=lambda: lifecycle.is_serving,
        public=public,
        max_body_bytes=max_body_bytes,
    )
    return app


def _add_common_routes(
    app: FastAPI,
    service: str,
    lifecycle: Lifecycle,
    health: Callable[[], Health] | None,
    stats: Callable[[], Stats | Awaitable[Stats]] | None,
) -> None:
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
        """200 when the service answers requests, 503 while it starts, drains or is unhealthy. Needs no token."""
        now = current_health()
        return model_response(now, 200 if now.status == "healthy" else 503)

    @app.get("/metrics", tags=["common"], responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def get_metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats", tags=["common"], response_model=dict[str, Any])
    async def get_stats() -> Response:
        """What the service has done and holds."""
        content = stats() if stats is not None else {}
        return JsonResponse({"service": service, **(await content if inspect.isawaitable(content) else content)})


def _add_settings_route(app: FastAPI, settings: Settings) -> None:
    @app.get("/settings", tags=["common"], response_model=ComponentRecord)
    async def get_settings() -> Response:
        """Return what the service runs with: settings without secrets, the code's commit, versions of packages."""
        return model_response(await asyncio.to_thread(provenance.describe, settings))


def _describe(app: FastAPI, *, asks_token: bool) -> None:
    """Puts the problem documents and the token, which the gate sees to, into the OpenAPI page."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = generate()
        components = document.setdefault("components", {})
        components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
        if asks_token:
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"token": []}]
            document["paths"]["/health"]["get"]["security"] = []
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI documents replacing it


def _background_lifespan(
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]], lifecycle: Lifecycle
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    stop = asyncio.Event()

    async def live(app: FastAPI) -> None:
        try:
            async with lifespan(app):
                _calm_garbage_collection()
                lifecycle.ready.set()
                log.info("ready")
                await stop.wait()
        # Not swallowed: run() and wait_ready() raise it.
        except Exception as error:  # noqa: BLE001
            lifecycle.fail(error)
        finally:
            lifecycle.ended.set()

    @asynccontextmanager
    async def outer(app: FastAPI) -> AsyncIterator[None]:
        life = asyncio.create_task(live(app))
        try:
            yield
        finally:
            stop.set()
            if not lifecycle.ready.is_set():
                life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await life

    return outer


def _calm_garbage_collection() -> None:
    # What was loaded stays: left out, a full collection costs microseconds and not tens of milliseconds. Requests make
    # many containers and hardly a cycle, so collections may be rarer than Python's default of every 700 containers.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


SettingsT = TypeVar("SettingsT", bound=Settings)
