"""Worker processes that can be killed: each evaluates one answer at a time, and is replaced when it ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import signal
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import orjson
from prometheus_client import Counter, Gauge

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.protocol.groups import RewardStatus
from services.reward_server import worker
from services.reward_server.settings import RewardSettings

log = get_logger(__name__)

KILLED = Counter("reward_workers_killed", "Workers that ended over an answer.", ["reason"])
PENDING = Gauge("reward_answers_pending", "Answers that wait for a worker.")
ALIVE = Gauge("reward_workers_alive", "Workers that answer.")

MAX_PENDING = 20_000
"""Answers that may wait for a worker, which bounds the memory; further answers come back ``overloaded``."""
START_SECONDS = 60.0
_END_SECONDS = 2.0
_MEMORY_POLL_SECONDS = 0.05

# multiprocessing looks for ended processes whenever it starts one, and an exit code can be read only once: of two
# threads that do so at the same time, one gets no exit code and reports 255.
_PROCESSES = threading.Lock()


@dataclass(frozen=True)
class Evaluation:
    """The outcome of one reward function for one answer: a value, or the reason why there is none."""

    value: float | None
    status: RewardStatus = RewardStatus.SCORED
    reason: str | None = None
    extracted: str | None = None
    """The answer that the function read from the response."""


_STOPPED = Evaluation(None, RewardStatus.OVERLOADED, "the server is stopping")


class _Worker:
    """A process that evaluates answers, and the connection to it."""

    def __init__(self, settings: RewardSettings, *, limits_memory: bool) -> None:
        """Start a process and wait until it has loaded its functions.

        Raises:
            ConfigurationError: the functions cannot be loaded.
        """
        functions = settings.worker_functions
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["services.reward_server.worker", *(["services.reward_server.verifier"] if "math" in functions else [])]
        )
        self._connection, theirs = context.Pipe()
        memory_bytes = settings.reward_memory_mb * 2**20 if limits_memory else None
        self._process = context.Process(
            target=worker.run,
            args=(theirs, functions, settings.reward_format_pattern, settings.reward_cpu_seconds, memory_bytes),
            daemon=True,
        )
        with theirs, _PROCESSES:
            self._process.start()
        try:
            reason = self._receive(START_SECONDS)["reason"]
        except (EOFError, OSError) as error:
            reason = f"a worker ended before it was ready ({type(error).__name__})"
        if reason is not None:
            self.end()
            raise ConfigurationError(
                f"REWARD_FN {settings.reward_fn!r} cannot be loaded: {reason}; correct it or its module"
            )

    def ask(self, message: bytes, seconds: float, watched_bytes: int | None) -> dict[str, Any]:
        """Return the worker's reply to an answer.

        Args:
            message: the function and its item, as JSON.
            seconds: time that the reply may take.
            watched_bytes: growth of resident memory that ends the wait; None where the kernel limits memory.

        Raises:
            TimeoutError: the reply took too long.
            MemoryError: the process took more than ``watched_bytes``.
            EOFError, OSError: the process ended.
        """
        self._connection.send_bytes(message)
        if watched_bytes is not None:
            self._watch_memory(seconds, watched_bytes)
        return self._receive(seconds)

    def _receive(self, seconds: float) -> dict[str, Any]:
        if not self._connection.poll(seconds):
            raise TimeoutError
        reply: dict[str, Any] = orjson.loads(self._connection.recv_bytes())
        return reply

    def _watch_memory(self, seconds: float, watched_bytes: int) -> None:
        """Return when the reply or the end of the process can be read; MemoryError and TimeoutError as in ``ask``."""
        import psutil

        deadline = time.monotonic() + seconds
        try:
            process = psutil.Process(self._process.pid)
            before = process.memory_info().rss
            # The system has no event for memory: it can only be polled.
            while not self._connection.poll(_MEMORY_POLL_SECONDS):
                if process.memory_info().rss - before > watched_bytes:
                    raise MemoryError
                if time.monotonic() > deadline:
                    raise TimeoutError
        except psutil.NoSuchProcess:
            return

    def kill(self) -> None:
        """Kill the process."""
        with _PROCESSES:
            self._process.kill()

    def end(self) -> int | None:
        """Kill the process if it still runs and return its exit code; a negative code is the signal that ended it."""
        self._connection.close()
        with _PROCESSES:
            # A process that is ending by itself keeps its own exit code.
            self._process.join(0.2)
            if self._process.exitcode is None:
                self._process.kill()
                self._process.join(_END_SECONDS)
            return self._process.exitcode


class WorkerPool:
    """A pool of worker processes that evaluates answers, first come first served. A thread feeds each worker."""

    def __init__(self, settings: RewardSettings, *, watch_memory: bool = sys.platform == "darwin") -> None:
        """Make a pool. With ``watch_memory`` the server polls resident memory, because macOS ignores RLIMIT_AS."""
        self._settings = settings
        self._watch_memory = watch_memory
        self._jobs: queue.SimpleQueue[tuple[Future[Evaluation], bytes] | None] = queue.SimpleQueue()
        self._alive: set[_Worker] = set()
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()

    async def start(self) -> None:
        """Start the workers.

        Raises:
            ConfigurationError: the reward functions cannot be loaded.
        """
        if not self._settings.worker_functions:
            return
        starting = [in_background(self._start_worker) for _ in range(self._settings.reward_workers)]
        results = await asyncio.gather(*starting, return_exceptions=True)
        workers = [result for result in results if isinstance(result, _Worker)]
        failure = next((result for result in results if isinstance(result, BaseException)), None)
        if failure is not None:
            await asyncio.gather(*(asyncio.to_thread(started.end) for started in workers))
            raise failure
        for started in workers:
            self._set_alive(started, True)
            self._threads.append(threading.Thread(target=self._serve, args=(started,), daemon=True))
            self._threads[-1].start()

    async def stop(self) -> None:
        """Kill the workers; unfinished answers come back ``overloaded``."""
        self._stopping.set()
        for started in list(self._alive):
            started.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join, _END_SECONDS)

    @property
    def pending(self) -> int:
        """Number of answers that wait for a worker."""
        return self._jobs.qsize()

    @property
    def alive(self) -> int:
        """Number of workers that answer."""
        return len(self._alive)

    async def evaluate(self, function: str, item: dict[str, Any]) -> Evaluation:
        """Return the outcome of ``function`` for ``item``, once a worker is free."""
        if self.pending >= MAX_PENDING:
            return Evaluation(None, RewardStatus.OVERLOADED, f"{self.pending} answers wait for a worker already")
        job: Future[Evaluation] = Future()
        self._jobs.put((job, orjson.dumps({"function": function, "item": item})))
        PENDING.set(self.pending)
        seconds = self._settings.reward_queue_seconds
        result = asyncio.wrap_future(job)
        try:
            done, _ = await asyncio.wait([result], timeout=seconds)
            if not done and job.cancel():  # A job that a worker has begun cannot be cancelled.
                reason = f"no worker was free for {seconds:g} s (REWARD_QUEUE_SECONDS)"
                return Evaluation(None, RewardStatus.OVERLOADED, reason)
            return await result
        finally:
            job.cancel()

    def _serve(self, current: _Worker) -> None:
        """Feed one worker, and its successors when it ends, until the pool stops."""
        while (job := self._jobs.get()) is not None:
            PENDING.set(self.pending)
            future, message = job
            if not future.set_running_or_notify_cancel():
                continue
            if self._stopping.is_set():
                future.set_result(_STOPPED)
                continue
            future.set_result(self._evaluate(current, message))
            if current not in self._alive:
                current = self._replace(current)
        current.end()

    def _evaluate(self, current: _Worker, message: bytes) -> Evaluation:
        watched_bytes = self._settings.reward_memory_mb * 2**20 if self._watch_memory else None
        try:
            reply = current.ask(message, self._settings.reward_timeout_seconds, watched_bytes)
        except (TimeoutError, MemoryError, EOFError, OSError) as error:
            self._set_alive(current, False)
            evaluation = self._explain_end(error, current.end())
            KILLED.labels(evaluation.status.value).inc()
            return evaluation
        if "value" in reply:
            return Evaluation(reply["value"])
        return Evaluation(None, RewardStatus(reply["status"]), reply["reason"])

    def _explain_end(self, error: Exception, exit_code: int | None) -> Evaluation:
        """Return the outcome of an answer whose worker ended."""
        if self._stopping.is_set():
            return _STOPPED
        if isinstance(error, TimeoutError):
            return Evaluation(None, RewardStatus.TIMEOUT, f"more than {self._settings.reward_timeout_seconds:g} s")
        if exit_code == -signal.SIGPROF:
            limit = f"{self._settings.reward_cpu_seconds:g} s of processor time"
            return Evaluation(None, RewardStatus.TIMEOUT, f"more than {limit}")
        if isinstance(error, MemoryError) or exit_code == worker.EXIT_MEMORY:
            limit = f"{self._settings.reward_memory_mb} MB of memory (REWARD_MEMORY_MB)"
            return Evaluation(None, RewardStatus.MEMORY, f"more than {limit}")
        reason = f"the worker died over it (exit code {exit_code})"
        if exit_code == -signal.SIGKILL:
            # Perhaps for another process's memory, perhaps by hand: it says nothing about the answer.
            reason = "the worker was killed by signal 9, which the kernel's out-of-memory killer or a person sends"
        elif exit_code is not None and exit_code < 0:
            reason = f"the worker died over it ({signal.Signals(-exit_code).name})"
        return Evaluation(None, RewardStatus.ERROR, reason)

    def _replace(self, ended: _Worker) -> _Worker:
        """Return a new worker as soon as one starts; the ended one if the pool stops before that."""
        pause = 0.0
        while not self._stopping.wait(pause):
            try:
                current = self._start_worker()
            except (ConfigurationError, EOFError, OSError) as error:
                log.error("a worker cannot be started", error=str(error))
                pause = min(max(0.1, pause * 2), 5.0)
            else:
                self._set_alive(current, True)
                return current
        return ended

    def _start_worker(self) -> _Worker:
        return _Worker(self._settings, limits_memory=not self._watch_memory)

    def _set_alive(self, changed: _Worker, alive: bool) -> None:
        (self._alive.add if alive else self._alive.discard)(changed)
        ALIVE.set(len(self._alive))
