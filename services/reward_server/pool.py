"""Worker processes that can be killed: each evaluates one answer at a time, and is replaced when it ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from prometheus_client import Gauge

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.machine import threads
from services.core.processes import describe_exit
from services.core.tasks import in_background
from services.protocol.rewards import RewardStatus
from services.reward_server.settings import RewardSettings
from services.reward_server.worker import EXIT_MEMORY, run

T = TypeVar("T")

log = get_logger(__name__)

PENDING = Gauge("reward_answers_pending", "Answers that wait for a worker.")
ALIVE = Gauge("reward_workers_alive", "Workers that answer.")

MAX_PENDING = 20_000
"""Answers that may wait for a worker, which bounds the memory; further answers come back ``overloaded``."""
START_SECONDS = 300.0
"""All workers at once may import torch for a user's function, from a network disk."""
_END_SECONDS = 2.0
_RESTART_SECONDS = 1.0

# multiprocessing looks for ended processes whenever it starts one, and an exit code can be read only once: if two
# threads look at the same time, one of them gets no exit code and reports 255.
_PROCESSES = threading.Lock()


@dataclass(frozen=True)
class Evaluation:
    """The outcome of one reward function for one answer: a value, or the reason why there is none.

    Without a value, the function does not apply to the row if the status is ``scored``, and failed otherwise.
    """

    value: float | None
    status: RewardStatus = RewardStatus.SCORED
    reason: str | None = None
    extracted: str | None = None
    """The answer that the function read from the response."""


class _Worker:
    """A process that evaluates answers, and the connection to it. Its methods block."""

    def __init__(self, settings: RewardSettings) -> None:
        """Start a process and wait until it has loaded its functions.

        Raises:
            ConfigurationError: the functions cannot be loaded.
        """
        functions = settings.worker_functions
        context = multiprocessing.get_context("forkserver")
        slow_to_import = {"math": "verifier", "reasoning_gym": "reasoning"}
        modules = ["worker", *(module for name, module in slow_to_import.items() if name in functions)]
        context.set_forkserver_preload([f"services.reward_server.{module}" for module in modules])
        self._connection, far_end = context.Pipe()
        limits = (settings.reward_cpu_seconds, settings.reward_memory_mb * 2**20)
        n_threads = threads(processes=settings.reward_workers)
        self._process = context.Process(target=run, args=(far_end, functions, n_threads, *limits), daemon=True)
        with far_end, _PROCESSES:
            self._process.start()
        try:
            reason = self._receive(START_SECONDS)["reason"]
        except TimeoutError:
            reason = f"a worker was not ready within {START_SECONDS:g} s"
        except (EOFError, OSError) as error:
            reason = f"a worker ended before it was ready ({type(error).__name__})"
        if reason is not None:
            self.end()
            raise refusal(settings.all_rewards, reason)

    @property
    def is_dead(self) -> bool:
        """True once the process of a free worker has ended: a free worker sends nothing before that."""
        return self._connection.poll(0)

    def ask(self, message: bytes, seconds: float) -> dict[str, Any]:
        """Return the worker's reply to ``message``, the function and its item as JSON.

        Raises:
            TimeoutError: the reply took more than ``seconds``.
            EOFError, OSError: the process ended.
        """
        self._connection.send_bytes(message)
        return self._receive(seconds)

    def _receive(self, seconds: float) -> dict[str, Any]:
        if not self._connection.poll(seconds):
            raise TimeoutError
        reply: dict[str, Any] = orjson.loads(self._connection.recv_bytes())
        return reply

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


def refusal(reward_fn: str, reason: str) -> ConfigurationError:
    """Return the error for a REWARD_FN whose functions cannot be loaded."""
    return ConfigurationError(f"REWARD_FN {reward_fn!r} cannot be loaded: {reason}; correct it or its module")


class WorkerPool:
    """A pool of worker processes that evaluates answers, first come first served."""

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self._alive: set[_Worker] = set()
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self.pending = 0
        """Number of answers that wait for a worker."""
        PENDING.set_function(lambda: self.pending)
        ALIVE.set_function(lambda: self.alive)

    async def start(self) -> None:
        """Start the workers.

        Raises:
            ConfigurationError: the reward functions cannot be loaded.
        """
        count = self._settings.reward_workers if self._settings.worker_functions else 0
        results = await asyncio.gather(*(self._add() for _ in range(count)), return_exceptions=True)
        for result in results:
            if result is not None:
                await self.stop()
                raise result

    async def stop(self) -> None:
        """Kill the workers; the answers that they evaluate have no reward."""
        self._stopping = True
        for worker in self._alive:
            worker.kill()
        await asyncio.gather(*self._tasks)
        await asyncio.gather(*(in_background(worker.end) for worker in self._alive))

    @property
    def alive(self) -> int:
        """Number of workers that answer."""
        return len(self._alive)

    async def evaluate(self, function: str, item: dict[str, Any]) -> Evaluation:
        """Return the outcome of ``function`` for ``item``, once a worker is free."""
        if self.pending >= MAX_PENDING:
            return Evaluation(None, RewardStatus.OVERLOADED, f"{self.pending} answers wait for a worker already")
        seconds = self._settings.queue_seconds
        self.pending += 1
        try:
            async with asyncio.timeout(seconds):
                worker = await self._take()
        except TimeoutError:
            reason = (
                f"no worker was free for {seconds:g} s (a fifteenth of SERVICE_DEADLINE_SECONDS); one answer may take "
                f"{self._settings.reward_timeout_seconds:g} s of one of {len(self._alive)} (REWARD_TIMEOUT_SECONDS)"
            )
            return Evaluation(None, RewardStatus.OVERLOADED, reason)
        finally:
            self.pending -= 1
        # The worker finishes its answer even if nobody waits for it any longer.
        return await asyncio.shield(self._run(self._evaluate(worker, function, item)))

    async def _take(self) -> _Worker:
        """Return a worker once one is free; replace a worker that died meanwhile, such as for lack of memory."""
        while (worker := await self._free.get()).is_dead:
            self._run(self._remove(worker))
        return worker

    async def _evaluate(self, worker: _Worker, function: str, item: dict[str, Any]) -> Evaluation:
        message = orjson.dumps({"function": function, "item": item})
        seconds = self._settings.reward_timeout_seconds
        try:
            reply = await in_background(lambda: worker.ask(message, seconds))
        except (TimeoutError, EOFError, OSError) as error:
            return self._explain_end(error, await self._remove(worker))
        self._free.put_nowait(worker)
        # None is also what nan becomes in JSON, from a function that replaces math.isfinite.
        if (value := reply.get("value")) is not None or reply.get("applies") is False:
            return Evaluation(value)
        reason = reply.get("reason", f"{function} returned no finite number")
        return Evaluation(None, RewardStatus.ERROR, reason)

    async def _remove(self, worker: _Worker) -> int | None:
        """End a worker, let another take its place, and return its exit code."""
        self._alive.discard(worker)
        exit_code = await in_background(worker.end)
        if not self._stopping:
            self._run(self._replace())
        return exit_code

    def _explain_end(self, error: Exception, exit_code: int | None) -> Evaluation:
        """Return the outcome of an answer whose worker ended."""
        settings, status = self._settings, RewardStatus.OVER_LIMIT
        if isinstance(error, TimeoutError):
            status = RewardStatus.TIMEOUT
            limit = f"{settings.reward_timeout_seconds:g} s by the clock (REWARD_TIMEOUT_SECONDS)"
        elif exit_code == -signal.SIGPROF:
            limit = f"{settings.reward_cpu_seconds:g} s of processor time (REWARD_CPU_SECONDS)"
        elif exit_code == EXIT_MEMORY:
            limit = f"{settings.reward_memory_mb} MB of memory (REWARD_MEMORY_MB)"
        else:
            end = "does not end" if exit_code is None else describe_exit(exit_code)
            advice = "if a library lacked memory, raise REWARD_MEMORY_MB"
            return Evaluation(None, RewardStatus.ERROR, f"the worker {end} over this answer; {advice}")
        return Evaluation(None, status, f"more than {limit}")

    async def _replace(self) -> None:
        """Add a new worker as soon as one starts, unless the pool stops before that."""
        while not self._stopping:
            try:
                await self._add()
            except (ConfigurationError, EOFError, OSError) as error:
                log.error("a worker cannot be started", error=str(error))
                await asyncio.sleep(_RESTART_SECONDS)
            else:
                return

    async def _add(self) -> None:
        worker = await in_background(lambda: _Worker(self._settings))
        self._alive.add(worker)
        self._free.put_nowait(worker)

    def _run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
