"""The lifecycle of a service: starting while its lifespan loads, then serving, then draining until the process ends.

The port is open while the lifespan loads: /health answers 503 "starting" and every other route 503, so that callers
need not guess how long to wait. On SIGTERM or SIGINT a service says "draining", finishes the requests in flight,
refuses new requests, and exits with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI

from services.core import logs

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

log = logs.get_logger(__name__)


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
