"""Helpers for asyncio: awaitables until the first ends or a signal comes, work in a thread, a watch over waits."""

from __future__ import annotations

import asyncio
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
from typing import Any, TypeVar

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


async def in_background(work: Callable[[], T]) -> T:
    """Run blocking ``work`` in a daemon thread and return its result.

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
    return await asyncio.wrap_future(done)


async def run_until_signal(work: Coroutine[Any, Any, object], message: str) -> int:
    """Run ``work`` until it ends, or until Ctrl-C, SIGTERM or a hang-up cancels it; return the exit code.

    ``message`` is a line for stderr, in which ``{}`` stands for the signal's name. Errors of ``work`` are raised.
    """
    task = asyncio.ensure_future(work)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
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
