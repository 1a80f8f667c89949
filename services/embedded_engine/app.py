"""The application of the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import Response

from services.core.logs import get_logger
from services.core.tasks import in_background
from services.embedded_engine import routes, weight_routes
from services.embedded_engine.engine import Engine, EngineStoppedError, NotIdleError, QueueFullError
from services.embedded_engine.loading import load
from services.embedded_engine.requests import EngineState
from services.embedded_engine.weights import WeightsError
from services.engines.settings import EngineSettings
from services.http.app import Lifecycle, Stats, create_service_app
from services.http.problems import printable, problem_response

log = get_logger(__name__)

SERVICE = "rollout-engine"
DRAIN_SECONDS = 3.0
"""The time that running requests still get at the end, before they are answered as aborted; below the service's own."""

REFUSALS = {QueueFullError: 429, EngineStoppedError: 503, NotIdleError: 400, WeightsError: 400}
"""The status by which a route answers that the engine refuses its work."""


def create_app(settings: EngineSettings) -> FastAPI:
    """Return the application; it loads the model once it runs."""

    def stats() -> Stats:
        state: EngineState = app.state.engine
        return state.engine.stats()

    app = create_service_app(
        SERVICE,
        settings=settings,
        lifespan=lambda app: _serve_model(app, settings),
        stats=stats,
        description="Generates completions: the part of SGLang's HTTP contract that this project uses.",
    )
    for refusal in REFUSALS:
        app.add_exception_handler(refusal, _on_refusal)
    app.include_router(routes.router)
    app.include_router(weight_routes.router)
    return app


async def _on_refusal(http: Request, error: Exception) -> Response:
    """Return a problem document that also has the members of SGLang's refusals."""
    status, path, reason = REFUSALS[type(error)], printable(http.url.path), str(error)
    if status == 400:
        log.warning("refused", path=path, reason=reason)
    headers = None if status == 400 else {"Retry-After": "1"}
    members = {"success": False, "message": reason, "num_paused_requests": 0}
    return problem_response(status, reason, instance=path, headers=headers, **members)


@asynccontextmanager
async def _serve_model(app: FastAPI, settings: EngineSettings) -> AsyncIterator[None]:
    """Load the model and run the engine within the context."""
    loaded = await in_background(lambda: load(settings))
    model = loaded.model
    loop, lifecycle = asyncio.get_running_loop(), app.state.lifecycle

    def fail(error: Exception) -> None:
        loop.call_soon_threadsafe(lifecycle.fail, error)

    engine = Engine(loaded, on_failure=fail)
    engine.start()
    app.state.engine = EngineState(settings, loaded, engine, model_path=settings.model_name)
    app.state.receiver = weight_routes.WeightsReceiver(model.architecture, model.device)
    log.info(
        "model loaded",
        model=settings.model_name,
        family=model.architecture.family,
        context_length=model.context_length,
    )
    drain = asyncio.create_task(_abort_after_drain(lifecycle, engine))
    try:
        yield
    finally:
        drain.cancel()
        await asyncio.to_thread(engine.stop)
        app.state.receiver.close()
        log.info("engine stopped", generated_tokens=engine.stats()["generated_tokens"])


async def _abort_after_drain(lifecycle: Lifecycle, engine: Engine) -> None:
    await lifecycle.draining.wait()
    await asyncio.sleep(DRAIN_SECONDS)
    engine.abort(lambda _: True, "the engine is stopping")
