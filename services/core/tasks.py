"""Helpers for asyncio: run until the first of some awaitables ends, or until a signal; work in threads; clocks.

ServiceThread is an event loop in a thread for a program that computes: the trainer's clients, its collector and its
status page live there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from services.core.processes import stop_signals

T = TypeVar("T")


async def run_until_first_ends(*parts: Awaitable[object]) -> None:
    """Run all awaitables until one ends, then cancel the others, wait for them, and raise the first error of any.

    Unlike asyncio.TaskGroup, this does not wait for all of them, and it raises an error as it is, without a group.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


_idle: deque[SimpleQueue[Callable[[], object]]] = deque()
"""The inboxes of threads that have nothing to do."""
MAX_IDLE = 32
os.register_at_fork(after_in_child=_idle.clear)


def start_in_background(work: Callable[[], object]) -> None:
    """Run ``work``, which must not raise, in a daemon thread that is idle, or in a new one."""
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = SimpleQueue()
        # Starting a thread costs several times what waking one does.
        threading.Thread(target=_serve, args=(inbox,), name="in-background", daemon=True).start()
    inbox.put(work)


def _serve(inbox: SimpleQueue[Callable[[], object]]) -> None:
    while True:
        inbox.get()()
        if len(_idle) >= MAX_IDLE:
            return
        _idle.append(inbox)


def in_background(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run blocking ``work`` in a daemon thread; return the future of its result.

    Python waits for the threads of asyncio.to_thread when it exits. It does not wait for a daemon thread, so a signal
    can end a long load.
    """
    done: Future[T] = Future()

    def run_work() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # raised where the result is awaited
            done.set_exception(error)
        else:
            done.set_result(result)

    start_in_background(run_work)
    return asyncio.wrap_future(done)


async def run_until_signal(work: Coroutine[Any, Any, object], message: str) -> int:
    """Run ``work`` until it ends, or until Ctrl-C, SIGTERM or a hang-up cancels it; return the exit code.

    ``message`` is a line for stderr, in which ``{}`` stands for the signal's name. Errors of ``work`` are raised.
    """
    task = asyncio.ensure_future(work)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
        print(message.format(received[0].name), file=sys.stderr)
        return 128 + received[0]
    return 0


class Stopwatch:
    """A stopwatch that runs while at least one of its ``running`` contexts is open."""

    def __init__(self) -> None:
        self._open = 0
        self._started = 0.0
        self._before = 0.0

    @property
    def seconds(self) -> float:
        """The seconds that it has run."""
        return self._before + (time.monotonic() - self._started if self._open else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the stopwatch run within the context; contexts that overlap count once."""
        if not self._open:
            self._started = time.monotonic()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._before += time.monotonic() - self._started


class Timeline:
    """Spans of this process on named tracks; they are kept only between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, str, float, float]] | None = None
        self._began = 0.0

    def begin(self) -> None:
        """Begin to keep spans."""
        self._spans, self._began = [], time.perf_counter()

    def add(self, track: str, name: str, start: float, end: float) -> None:
        """Add a span from ``start`` to ``end`` (time.perf_counter); what lies before ``begin`` is cut off."""
        if self._spans is not None and end > self._began:
            self._spans.append((track, name, max(start, self._began), end))

    def end(self) -> list[dict[str, Any]]:
        """Return the spans as events of Chrome's trace format, in microseconds since ``begin``, and keep no more."""
        spans, self._spans = self._spans or [], None
        tracks = {track: number for number, track in enumerate(dict.fromkeys(track for track, *_ in spans))}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": track}}
            for track, number in tracks.items()
        ]
        for track, name, start, end in spans:
            begin, lasted = (start - self._began) * 1e6, (end - start) * 1e6
            events.append({"ph": "X", "name": name, "pid": 0, "tid": tracks[track], "ts": begin, "dur": lasted})
        return events


TIMELINE = Timeline()
"""The timeline of this process."""


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

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel_started(), self._loop).result(2 * END_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_SECONDS)

    def call(
        self,
        work: Coroutine[Any, Any, T],
        *,
        interruptible: bool = False,
        meanwhile: Callable[[], None] | None = None,
        between_polls: Callable[[], None] | None = None,
    ) -> T:
        """Run ``work`` on the event loop and wait for its result.

        Args:
            work: a coroutine, which bounds its own waits.
            interruptible: give up as soon as the run is asked to stop.
            meanwhile: called in this thread every MEANWHILE_SECONDS of the wait.
            between_polls: the same every POLL_SECONDS; it may take long.

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
                if between_polls is not None:
                    between_polls()
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
