"""Runs coroutines beside the training: rank 0's clients, collectors and status page live on an event loop of their
own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from services.core.errors import DependencyLostError

T = TypeVar("T")

POLL_SECONDS = 0.1
START_SECONDS = 60.0
END_SECONDS = 5.0
"""How long what was started may take to end."""


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

    def call(self, work: Coroutine[Any, Any, T], deadline_seconds: float, *, interruptible: bool = False) -> T:
        """Runs ``work`` and waits for its result.

        Args:
            work: a coroutine.
            deadline_seconds: longest wait.
            interruptible: give up as soon as the run is asked to stop.

        Raises:
            DependencyLostError: it took longer than the deadline.
            InterruptedCallError: the run was asked to stop.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        end = time.monotonic() + deadline_seconds
        while True:
            try:
                return future.result(timeout=POLL_SECONDS)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
            if interruptible and self._should_stop():
                future.cancel()
                raise InterruptedCallError
            if time.monotonic() > end:
                future.cancel()
                raise DependencyLostError(
                    f"{getattr(work, '__qualname__', work)} took longer than {deadline_seconds:g} s"
                )

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts ``work``, which runs until it ends or the thread does."""

        async def create() -> None:
            self._started.add(asyncio.create_task(work))

        asyncio.run_coroutine_threadsafe(create(), self._loop).result(START_SECONDS)

    async def _cancel_started(self) -> None:
        for task in self._started:
            task.cancel()
        if self._started:
            await asyncio.wait(self._started, timeout=END_SECONDS)
