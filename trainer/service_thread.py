"""An event loop beside the training: rank 0's clients, its collector and the status page live on it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.1
MEANWHILE_SECONDS = 2.0
"""The time between two calls of ``meanwhile``."""
START_SECONDS = 60.0
END_SECONDS = 5.0
"""The longest time that coroutines may take to end once they are cancelled."""


class InterruptedCallError(Exception):
    """A call was given up because the run was asked to stop."""


class ServiceThread:
    """An event loop in a thread. A context manager: leaving it cancels what ``start`` started."""

    def __init__(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        self._should_stop = should_stop
        self._loop = asyncio.new_event_loop()
        self._started: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="services", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel_started(), self._loop).result(2 * END_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_SECONDS)

    def call(
        self,
        work: Coroutine[Any, Any, T],
        *,
        interruptible: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> T:
        """Run ``work`` on the event loop and wait for its result.

        Args:
            work: a coroutine, which bounds its own waits.
            interruptible: give up as soon as the run is asked to stop.
            meanwhile: called in this thread every MEANWHILE_SECONDS of the wait.

        Raises:
            InterruptedCallError: the run was asked to stop.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        called = time.monotonic()
        try:
            while True:
                done, _ = concurrent.futures.wait([future], timeout=POLL_SECONDS)
                if done:
                    return future.result()
                if interruptible and self._should_stop():
                    raise InterruptedCallError
                if meanwhile is not None and time.monotonic() - called > MEANWHILE_SECONDS:
                    meanwhile()
                    called = time.monotonic()
        finally:
            future.cancel()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start ``work``, which runs until it ends or the thread does; return its task."""

        async def create() -> asyncio.Task[None]:
            task = asyncio.create_task(work)
            self._started.add(task)
            return task

        return asyncio.run_coroutine_threadsafe(create(), self._loop).result(START_SECONDS)

    async def _cancel_started(self) -> None:
        for task in self._started:
            task.cancel()
        if self._started:
            await asyncio.wait(self._started, timeout=END_SECONDS)
