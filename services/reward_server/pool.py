"""Worker processes that can be killed: one answer at a time each, replaced when they exceed a limit or die."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from typing import Any

import orjson
from prometheus_client import Counter, Gauge

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.protocol import RewardStatus
from services.reward_server import worker
from services.reward_server.settings import RewardSettings

log = get_logger(__name__)

KILLED = Counter("reward_workers_killed", "Workers that ended over an answer.", ["reason"])
PENDING = Gauge("reward_answers_pending", "Answers that wait for a worker.")
ALIVE = Gauge("reward_workers_alive", "Workers that answer.")

START_SECONDS = 60.0
_END_SECONDS = 2.0
_FORK_SERVER_POLL_SECONDS = 0.05
_MEMORY_WATCH_SECONDS = 0.05

# multiprocessing looks for ended processes whenever it starts one, and an exit code can be read only once: of two
# threads that do so at the same time one gets none, which it takes for a 255.
_PROCESSES = threading.Lock()


@dataclass(frozen=True)
class Evaluation:
    """What came of one answer: a value, or why there is none."""

    value: float | None
    status: RewardStatus = RewardStatus.SCORED
    reason: str | None = None


class _StartError(Exception):
    """A worker could not load its functions, or did not say that it had."""


class _Worker:
    """One process and the socket to it."""

    def __init__(self, process: ForkServerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, functions: list[str], settings: RewardSettings, *, limits_memory: bool) -> _Worker:
        """Starts a process and waits until it has loaded its functions."""
        memory = settings.reward_memory_mb * 2**20 if limits_memory else None
        limits = worker.Limits(settings.reward_cpu_seconds, memory)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["services.reward_server.worker", *(["services.reward_server.verifier"] if "math" in functions else [])]
        )
        ours, theirs = socket.socketpair()
        process = context.Process(
            target=worker.run, args=(theirs, functions, settings.reward_format_pattern, limits), daemon=True
        )
        with theirs:
            await asyncio.to_thread(_start, process)
        reader, writer = await asyncio.open_connection(sock=ours)
        started = cls(process, reader, writer)
        try:
            async with asyncio.timeout(START_SECONDS):
                hello = await started._receive()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            await started.end()
            raise _StartError(f"a worker ended before it was ready ({type(error).__name__})") from error
        if not hello["ready"]:
            await started.end()
            raise _StartError(hello["reason"])
        return started

    async def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The worker's reply. TimeoutError, or the connection's errors where the process died."""
        body = orjson.dumps(message)
        async with asyncio.timeout(seconds):
            self._writer.write(worker.LENGTH.pack(len(body)) + body)
            await self._writer.drain()
            return await self._receive()

    async def end(self) -> int | None:
        """Kills the process and returns its exit code: negative is the signal that it died of."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        return await asyncio.to_thread(self._kill_and_join)

    def _kill_and_join(self) -> int | None:
        with _PROCESSES:
            # One that is dying of its own keeps its own exit code.
            self.process.join(0.2)
            if self.process.exitcode is None:
                self.process.kill()
                self.process.join(_END_SECONDS)
            return self.process.exitcode

    async def _receive(self) -> dict[str, Any]:
        head = await self._reader.readexactly(worker.LENGTH.size)
        body = await self._reader.readexactly(worker.LENGTH.unpack(head)[0])
        reply: dict[str, Any] = orjson.loads(body)
        return reply


def _start(process: ForkServerProcess) -> None:
    """Has multiprocessing's fork server start it; a server that was killed is replaced once it is seen to be dead."""
    deadline = time.monotonic() + _END_SECONDS
    while True:
        try:
            with _PROCESSES:
                process.start()
        except (ConnectionError, EOFError) as error:
            if time.monotonic() > deadline:
                raise
            log.warning("the server that starts workers is gone, asking again", error=repr(error))
            time.sleep(_FORK_SERVER_POLL_SECONDS)
        else:
            return


@dataclass
class _Job:
    message: dict[str, Any]
    done: asyncio.Future[Evaluation]
    expires: asyncio.TimerHandle | None = None

    def overload(self, reason: str) -> None:
        """Ends the wait without a value."""
        self.begin()
        if not self.done.done():
            self.done.set_result(Evaluation(None, RewardStatus.OVERLOADED, reason))

    def begin(self) -> None:
        """Says that the wait is over."""
        if self.expires is not None:
            self.expires.cancel()


class WorkerPool:
    """Evaluates answers in worker processes, in the order in which they come."""

    def __init__(self, functions: list[str], settings: RewardSettings, *, watch_memory: bool | None = None) -> None:
        """``functions`` are names that the workers load.

        ``watch_memory`` has the server watch their resident memory, for systems that have no RLIMIT_AS (macOS).
        """
        self._functions = functions
        self._settings = settings
        self._watch_memory = sys.platform == "darwin" if watch_memory is None else watch_memory
        self._jobs: deque[_Job] = deque()
        self._work = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self.alive = 0

    async def start(self) -> None:
        """Starts the workers.

        Raises:
            ConfigurationError: they cannot load the functions.
        """
        if not self._functions:
            return
        starting = [self._start_worker() for _ in range(self._settings.reward_workers)]
        results = await asyncio.gather(*starting, return_exceptions=True)
        workers = [result for result in results if isinstance(result, _Worker)]
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await asyncio.gather(*(started.end() for started in workers))
            if isinstance(failures[0], _StartError):
                raise ConfigurationError(
                    f"REWARD_FN {self._settings.reward_fn!r} cannot be loaded: {failures[0]}; correct it or its module"
                ) from failures[0]
            raise failures[0]
        self._tasks = [asyncio.create_task(self._serve(started)) for started in workers]

    async def stop(self) -> None:
        """Kills the workers; answers that wait come back ``overloaded``."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._jobs:
            self._jobs.popleft().overload("the server is stopping")

    @property
    def pending(self) -> int:
        """How many answers wait for a worker."""
        return len(self._jobs)

    async def evaluate(self, function: str, item: dict[str, Any]) -> Evaluation:
        """What ``function`` makes of ``item``, once a worker is free."""
        if len(self._jobs) >= self._settings.reward_max_pending:
            reason = f"{len(self._jobs)} answers wait already (REWARD_MAX_PENDING)"
            return Evaluation(None, RewardStatus.OVERLOADED, reason)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Evaluation] = loop.create_future()
        seconds = self._settings.reward_queue_seconds
        reason = f"no worker was free for {seconds:g} s (REWARD_QUEUE_SECONDS)"
        job = _Job({"function": function, "item": item}, done)
        job.expires = loop.call_later(seconds, job.overload, reason)
        self._jobs.append(job)
        PENDING.set(len(self._jobs))
        async with self._work:
            self._work.notify()
        return await done

    async def _next_job(self) -> _Job:
        while True:
            async with self._work:
                await self._work.wait_for(lambda: bool(self._jobs))
                job = self._jobs.popleft()
            PENDING.set(len(self._jobs))
            job.begin()
            if not job.done.done():  # it may have expired, or its client left
                return job

    async def _serve(self, current: _Worker) -> None:
        """Feeds one worker, and its successors when it dies, until cancelled."""
        try:
            while True:
                self._set_alive(+1)
                try:
                    await self._feed(current)
                finally:
                    self._set_alive(-1)
                current = await self._replace()
        finally:
            await asyncio.shield(current.end())

    async def _feed(self, current: _Worker) -> None:
        """Gives answers to a worker until one is its end."""
        while True:
            job = await self._next_job()
            evaluation, survives = await self._evaluate(current, job.message)
            if not job.done.done():
                job.done.set_result(evaluation)
            if not survives:
                return

    async def _evaluate(self, current: _Worker, message: dict[str, Any]) -> tuple[Evaluation, bool]:
        watch = asyncio.create_task(self._watch(current)) if self._watch_memory else None
        try:
            reply = await current.ask(message, self._settings.reward_timeout_seconds)
        except TimeoutError:
            await current.end()
            return self._ended(RewardStatus.TIMEOUT, f"more than {self._settings.reward_timeout_seconds:g} s"), False
        except (asyncio.IncompleteReadError, ConnectionError):
            over_memory = watch is not None and watch.done()
            return self._obituary(await current.end(), over_memory), False
        finally:
            if watch is not None:
                watch.cancel()
        if "value" in reply:
            return Evaluation(reply["value"]), True
        return Evaluation(None, RewardStatus(reply["status"]), reply["reason"]), True

    def _obituary(self, exit_code: int | None, over_memory: bool) -> Evaluation:
        if exit_code == -signal.SIGPROF:
            limit = f"more than {self._settings.reward_cpu_seconds:g} s of processor time"
            return self._ended(RewardStatus.TIMEOUT, limit)
        if over_memory or exit_code == worker.EXIT_MEMORY:
            limit = f"more than {self._settings.reward_memory_mb} MB of memory (REWARD_MEMORY_MB)"
            return self._ended(RewardStatus.MEMORY, limit)
        if exit_code == -signal.SIGKILL:
            # Perhaps for another process's memory, perhaps by hand: it says nothing about the answer.
            return self._ended(
                RewardStatus.ERROR,
                "the worker was killed by signal 9, which the kernel's out-of-memory killer or a person sends",
            )
        how = signal.Signals(-exit_code).name if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"
        return self._ended(RewardStatus.ERROR, f"the worker died over it ({how})")

    def _ended(self, status: RewardStatus, reason: str) -> Evaluation:
        KILLED.labels(status.value).inc()
        return Evaluation(None, status, reason)

    async def _watch(self, current: _Worker) -> None:
        """Kills a worker whose resident memory grows beyond the limit; returns then."""
        import psutil

        process = psutil.Process(current.process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            before = process.memory_info().rss
            # There is no event for it: the system can only be asked, again and again.
            while process.memory_info().rss - before < self._settings.reward_memory_mb * 2**20:  # noqa: ASYNC110
                await asyncio.sleep(_MEMORY_WATCH_SECONDS)
            process.kill()

    async def _replace(self) -> _Worker:
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            try:
                return await self._start_worker()
            except (_StartError, OSError) as error:
                log.error("a worker cannot be started", error=str(error))
                pause = min(max(0.1, pause * 2), 5.0)

    async def _start_worker(self) -> _Worker:
        return await _Worker.start(self._functions, self._settings, limits_memory=not self._watch_memory)

    def _set_alive(self, change: int) -> None:
        self.alive += change
        ALIVE.set(self.alive)
