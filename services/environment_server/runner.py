"""A runner of environments' calls outside the server's event loop, with a time limit for each."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from services.core.errors import DependencyLostError, own_error
from services.core.logs import get_logger
from services.core.tasks import in_background, start_in_background
from services.environment_server.environments import EnvironmentBrokenError, EnvironmentHungError, why_failed

log = get_logger(__name__)

GRACE_SECONDS = 2.0
"""A coroutine that has not ended this long after its limit hangs: it blocks its event loop, or cannot be cancelled."""

BLOCKED = "another episode blocked the event loop that all coroutines here share; await every call that takes long"


class Runner:
    """Runs jobs, each of which may take ``seconds``.

    The functions of one call run in one thread, one after another. A function that takes longer is given up: its
    thread runs on, because nothing can end a thread, and another thread continues with the jobs behind it.

    All coroutines run on one event loop in a thread, because they may share objects of a loop, such as a client. If a
    coroutine hangs, the loop is given up, and a new loop takes the coroutines that had not begun.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop: _LoopThread | None = None
        self._releasing: set[asyncio.Task[None]] = set()
        self.stuck = 0
        """Jobs that were given up and have not come back since."""

    async def run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the results of ``jobs`` in order, with the exception of a job that failed in its result's place.

        Results that are awaitable, such as those of coroutine functions, are awaited all at once.
        """
        results: list[Any] = []
        while len(results) < len(jobs):
            results += await self._run_until_stuck(jobs[len(results) :])
        awaited = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
        for i, result in zip(awaited, await asyncio.gather(*(self._await(results[i]) for i in awaited)), strict=True):
            results[i] = result
        return results

    def release(self, close: Callable[[], Any]) -> None:
        """Run the job that closes an environment; only ``stop`` waits for it."""
        task = asyncio.ensure_future(self._release(close))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _release(self, close: Callable[[], Any]) -> None:
        [error] = await self.run([close])
        if isinstance(error, Exception):
            log.warning("an environment failed to close", error=why_failed(error))

    async def stop(self) -> None:
        """Wait until environments are closed, GRACE_SECONDS at most, and stop the event loop."""
        if self._releasing:
            await asyncio.wait(self._releasing, timeout=GRACE_SECONDS)
        if self._loop is not None:
            self._loop.stop()

    async def _await(self, awaitable: Awaitable[Any]) -> Any:
        """Return an awaitable's result or its error."""
        while True:
            loop = self._loop = self._loop or _LoopThread()
            work = _Work(awaitable, self._seconds, self._too_slow)
            done = loop.start(work)
            while not (done.done() or loop.given_up.done()) and work.left > 0:
                await asyncio.wait({done, loop.given_up}, timeout=work.left, return_when=asyncio.FIRST_COMPLETED)
            if not (done.done() or loop.given_up.done()) and (work.task is None or loop.runs(work)):
                loop.given_up.set_result(None)
                self._loop = None
            if not work.outcome.cancel():
                return await self._outlast(loop, work, done)

    async def _outlast(self, loop: _LoopThread, work: _Work, done: asyncio.Future[Any]) -> Any:
        """Return the result of work that has begun, also if its event loop was given up."""
        await asyncio.wait({done}, timeout=work.left)
        if not done.done() and loop.runs(work):
            self._count_stuck(done)
            return EnvironmentHungError(self._too_slow)
        # Other work blocks the loop.
        await asyncio.wait({done}, timeout=self._seconds)
        return done.result() if done.done() else DependencyLostError(BLOCKED)

    async def _run_until_stuck(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        results: list[Any] = []
        given_up = False

        def work() -> None:
            for job in jobs:
                try:
                    result = job()
                # Environments are other people's code and may raise anything; it becomes the end of their episode.
                except BaseException as error:  # noqa: BLE001
                    result = _failure(error)
                if given_up:
                    return
                results.append(result)

        thread = asyncio.ensure_future(in_background(work))
        while not thread.done():
            before = len(results)
            await asyncio.wait({thread}, timeout=self._seconds)
            if not thread.done() and len(results) == before:
                given_up = True
                self._count_stuck(thread)
                return [*results[:before], EnvironmentHungError(self._too_slow)]
        thread.result()
        return results

    def _count_stuck(self, job: asyncio.Future[Any]) -> None:
        self.stuck += 1
        job.add_done_callback(self._come_back)

    def _come_back(self, _job: asyncio.Future[Any]) -> None:
        self.stuck -= 1

    @property
    def _too_slow(self) -> str:
        return f"the environment took more than {self._seconds:g} s; raise ENVIRONMENT_STEP_SECONDS if it needs longer"


class _Work:
    """An awaitable with a time limit, which counts from its start; ``too_slow`` is the error if it takes longer."""

    def __init__(self, awaitable: Awaitable[Any], seconds: float, too_slow: str) -> None:
        self._awaitable, self._seconds, self._too_slow = awaitable, seconds, too_slow
        self._deadline = time.monotonic() + seconds + GRACE_SECONDS
        self.task: asyncio.Task[Any] | None = None
        """None until the work has begun."""
        self.outcome: Future[Any] = Future()
        """The awaitable's result or error. It can be cancelled until the work begins."""

    @property
    def left(self) -> float:
        """Seconds until the work hangs."""
        return self._deadline - time.monotonic()

    async def run(self) -> None:
        """Await the awaitable, unless the outcome was cancelled."""
        if not self.outcome.set_running_or_notify_cancel():
            return
        self._deadline = time.monotonic() + self._seconds + GRACE_SECONDS
        self.task = asyncio.current_task()
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                result = await self._awaitable
        # As above; CancelledError, too, which an environment may raise by itself.
        except BaseException as error:  # noqa: BLE001
            result = EnvironmentBrokenError(self._too_slow) if limit.expired() else _failure(error)
        # Here, and not when the task is done, because another task may block the loop before that is noticed.
        self.outcome.set_result(result)


class _LoopThread:
    """An event loop in a daemon thread, for coroutines that may block it."""

    def __init__(self) -> None:
        # With the default factory the loop would become that of the calling thread, too.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._loop.set_task_factory(_begin_task)
        self._unfinished = 0
        self.given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once another loop takes the place of this one, which then stops with its last coroutine."""
        start_in_background(self._serve)

    def start(self, work: _Work) -> asyncio.Future[Any]:
        """Begin work and return the future of its outcome."""
        self._unfinished += 1
        asyncio.run_coroutine_threadsafe(work.run(), self._loop)
        done = asyncio.wrap_future(work.outcome)
        done.add_done_callback(self._end)
        return done

    def runs(self, work: _Work) -> bool:
        """Return whether the work, or a task that it began, runs now, or nothing does."""
        running = asyncio.current_task(self._loop)
        return running is None or getattr(running, "root", running) is work.task

    def stop(self) -> None:
        """Cancel all coroutines and close the loop, as soon as it answers."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _end(self, _work: asyncio.Future[Any]) -> None:
        self._unfinished -= 1
        if self.given_up.done() and not self._unfinished:
            self.stop()

    def _serve(self) -> None:
        is_stopped = False
        while not is_stopped:
            # A SystemExit in a task goes through run_forever, and also to the coroutine that awaits the task.
            with contextlib.suppress(BaseException):
                self._loop.run_forever()
                is_stopped = True
        with contextlib.suppress(BaseException):
            self._runner.close()


def _begin_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Return a task. If another task began it, its attribute ``root`` is the first task of that chain."""
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
    if (parent := asyncio.current_task(loop)) is not None:
        task.root = getattr(parent, "root", parent)  # type: ignore[attr-defined]
    return task


def _failure(error: BaseException) -> Exception:
    """Return an environment's error, or in place of a SystemExit an error that ends its episode alone."""
    return error if isinstance(error, Exception) else EnvironmentBrokenError(own_error(error))
