"""The coordinator of worker processes: it starts and watches them, restarts them, and hands out the seeds.

A worker gets its next seeds when it has finished its episodes. The open episodes of a worker that dies return to the
front of the queue and are played one by one. So every seed is played, and an episode that kills its worker does not
take others with it twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from evaluation.policy.worker import Costs, PlayedEpisode, Work
from services.core.errors import (
    EXIT_CONFIGURATION,
    EXIT_RECOVERABLE,
    ConfigurationError,
    DependencyLostError,
    NeverReadyError,
)
from services.core.machine import THREADS_VARIABLE, cores, threads
from services.core.processes import Command, Restarts, describe_exit, end_group

MODULE = "evaluation.policy.worker"
RESTARTS = 3
"""Restarts of a worker in a row, without an episode that it finishes between them."""
TRIES = 3
"""An episode that is lost this often is left out, because it may be the cause."""
END_SECONDS = 5.0
"""The time between SIGTERM and SIGKILL."""
LINE_BYTES = 2**26
"""Longest line from a worker: an episode with the seconds of each of its decisions."""


class WorkerDiedError(Exception):
    """A worker process that ended before its work; the message says how."""


@dataclass
class Worker:
    """A worker and what its processes did; a restarted worker keeps its name."""

    name: str
    episodes: int = 0
    steps: int = 0
    playing_seconds: float = 0.0
    restarts: int = 0
    deaths: list[str] = field(default_factory=list)
    costs: Costs | None = None
    """The costs of the last process."""


@dataclass(frozen=True)
class Crew:
    """The worker processes to start."""

    count: int
    work: Work
    """The work of each; the worker's number is added to its name."""
    module: str = MODULE
    logs: Path | None = None
    """A directory for a log of each worker; None: this process's standard error."""
    restarts: int = RESTARTS
    episodes_at_once: int = 1
    """Episodes that a worker plays together, with one request to the head for a step of all of them."""
    is_together: bool = False
    """True if no worker plays before all are ready."""


class Coordinator:
    """Workers that play one episode for each seed."""

    def __init__(self, crew: Crew, seeds: Iterable[int], take: Callable[[PlayedEpisode], None]) -> None:
        """Describe the work, which ``run`` does; ``take`` gets each episode that ends, or is left out as failed."""
        self._crew = crew
        self._todo = deque(seeds)
        self._open: set[int] = set()
        self._tries: Counter[int] = Counter()
        self._take = take
        self._changed = asyncio.Condition()
        # Imports take a core for seconds, so more workers at once would only slow each other down.
        self._admission = asyncio.Semaphore(cores())
        self._ready: set[str] = set()
        self._given_up: dict[str, Exception] = {}
        self._may_begin = asyncio.Event()
        self.workers = [Worker(f"worker-{number}") for number in range(crew.count)]
        self.ready_at: float | None = None
        """When the workers began to play, by time.monotonic."""

    async def run(self) -> None:
        """Play all episodes.

        Raises:
            ConfigurationError: a worker cannot play with these settings.
            DependencyLostError: the head does not answer a worker, or all workers died too often.
            NeverReadyError: no worker ever became ready.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    group.create_task(self._keep(worker))
        except BaseExceptionGroup as errors:
            # One error is enough, because the first ends all workers.
            raise errors.exceptions[0] from None
        if self._todo:
            reason = next(iter(self._given_up.values()))
            raise (DependencyLostError if self._ready else NeverReadyError)(f"all workers are lost: {reason}")

    async def _keep(self, worker: Worker) -> None:
        """Run a worker's process, again after it died, until all episodes are played or it died too often."""
        restarts, before = Restarts(self._crew.restarts), 0
        while True:
            try:
                await self._run(worker)
            except WorkerDiedError as death:
                worker.deaths.append(str(death))
                if worker.episodes != before:
                    restarts.forget()
                before = worker.episodes
                if not restarts.add():
                    self._given_up[worker.name] = death
                    self._begin_if_complete()
                    return
            else:
                return
            if not self._todo and not self._open:
                return
            worker.restarts += 1

    async def _run(self, worker: Worker) -> None:
        """Run one process of a worker until no seeds are left.

        Raises:
            WorkerDiedError: the process ended early.
        """
        log = None if self._crew.logs is None else self._crew.logs / f"{worker.name}.log"
        async with contextlib.AsyncExitStack() as stack:
            async with self._admission:
                process = await stack.enter_async_context(self._process(worker, log))
                await _read(process, worker, log)
            self._ready.add(worker.name)
            self._begin_if_complete()
            if self._crew.is_together:
                await self._may_begin.wait()
            while seeds := await self._next():
                await self._play(seeds, worker, process, log)
            _input(process).close()
            worker.costs = Costs(**await _read(process, worker, log))
            await process.wait()

    async def _play(self, seeds: list[int], worker: Worker, process: Process, log: Path | None) -> None:
        """Let a process play the episodes of some seeds; episodes that do not end are played again."""
        _input(process).write(f"{json.dumps(seeds)}\n".encode())
        open_seeds = set(seeds)
        try:
            while open_seeds:
                episode = PlayedEpisode(**await _read(process, worker, log))
                open_seeds.discard(episode.seed)
                await self._settle(episode, worker)
        except WorkerDiedError as death:
            for seed in sorted(open_seeds):
                await self._settle(PlayedEpisode(seed, failed=str(death)), worker)
            raise

    async def _settle(self, episode: PlayedEpisode, worker: Worker) -> None:
        self._tries[episode.seed] += 1
        self._open.discard(episode.seed)
        if episode.failed and self._tries[episode.seed] < TRIES:
            self._todo.appendleft(episode.seed)
        else:
            self._take(episode)
        if not episode.failed:
            worker.episodes += 1
            worker.steps += episode.steps
            worker.playing_seconds += episode.seconds
        async with self._changed:
            self._changed.notify_all()

    async def _next(self) -> list[int]:
        """Return the next seeds; none when all episodes have ended. Waits while others may come back."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._todo or not self._open)
            seeds: list[int] = []
            while self._todo and len(seeds) < self._crew.episodes_at_once:
                # A seed whose worker died may be the cause, so it is played alone.
                if seeds and self._tries[self._todo[0]]:
                    break
                seeds.append(self._todo.popleft())
                if self._tries[seeds[-1]]:
                    break
            self._open.update(seeds)
            return seeds

    def _begin_if_complete(self) -> None:
        if len(self._ready | self._given_up.keys()) == len(self.workers) or not self._crew.is_together:
            self.ready_at = self.ready_at or time.monotonic()
            self._may_begin.set()

    @asynccontextmanager
    async def _process(self, worker: Worker, log: Path | None) -> AsyncIterator[Process]:
        """Start a process of a worker, and end it with its process group."""
        # Each process has another name, because the head keeps a silent server's name for a while.
        attempt = f".{worker.restarts}" if worker.restarts else ""
        work = replace(self._crew.work, name=f"{self._crew.work.name}{worker.name}{attempt}")
        # Otherwise the threads of all workers would contend for the cores.
        share = {THREADS_VARIABLE: str(threads(processes=self._crew.count))}
        command = Command(worker.name, sys.executable, self._crew.module, [json.dumps(asdict(work))], share)
        with contextlib.ExitStack() as stack:
            errors = None if log is None else stack.enter_context(log.open("ab"))
            process = await command.start(stdin=PIPE, stdout=PIPE, stderr=errors, limit=LINE_BYTES)
        try:
            yield process
        finally:
            await end_group(process, END_SECONDS)


def _input(process: Process) -> asyncio.StreamWriter:
    assert process.stdin is not None
    return process.stdin


async def _read(process: Process, worker: Worker, log: Path | None) -> dict[str, Any]:
    """Return the next line of a process.

    Raises:
        WorkerDiedError: the process ended.
        ConfigurationError: it ended because it cannot play with these settings.
        DependencyLostError: it ended because the head does not answer.
    """
    assert process.stdout is not None
    line = await process.stdout.readline()
    # A process that is killed may leave half a line.
    if line.endswith(b"\n"):
        content: dict[str, Any] = json.loads(line)
        return content
    code = await process.wait()
    last = _last_line(log)
    if code in (EXIT_CONFIGURATION, EXIT_RECOVERABLE) and last:
        raise (ConfigurationError if code == EXIT_CONFIGURATION else DependencyLostError)(last)
    raise WorkerDiedError(f"{worker.name} {describe_exit(code)}" + (f"; its log ends with {last!r}" if last else ""))


def _last_line(log: Path | None) -> str:
    lines = [] if log is None else log.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1][:500].removeprefix("error: ") if lines else ""
