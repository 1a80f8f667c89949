"""A supervisor that runs the tasks of a job group as SkyPilot's controller would, and leaves no process behind.

- A task's nodes start together. When one ends with an error the others are killed (137), and the whole task restarts if
  its ``job_recovery`` says so: always on a listed exit code, else while ``max_restarts_on_errors`` lasts. A node whose
  first process is killed stands for a lost node, which SkyPilot replaces; so its task restarts, too, LOST_NODES times.
- The run ends with its primary tasks. Auxiliaries outlive them by their ``termination_delay``, or not at all when a
  primary failed.

In two cases a restart would only fail again, so the run stops with the reason, although SkyPilot would continue:

- A task exits with 78, because a setting, dataset or model cannot be loaded or an engine never came up.
- A primary fails after an auxiliary has failed for good.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO

from local_runner import processes
from local_runner.nodes import LocalRun, node_environment
from local_runner.spec import TaskSpec
from services.core.errors import EXIT_CONFIGURATION
from services.core.processes import shell_code
from services.run_page.directory import START_MARK

PRIMARY_STOP_SECONDS = 60.0
"""The time from Ctrl-C to the end of the primary tasks, in which the trainer writes a checkpoint of some gigabytes.
A second Ctrl-C ends it."""
AUXILIARY_END_SECONDS = 5.0
"""The time that auxiliaries have to end after the primary tasks, when nobody waits for their work."""
KILLED = 128 + signal.SIGKILL
TERMINATED = 128 + signal.SIGTERM
LONGEST_BACKOFF_SECONDS = 30.0
LOST_NODES = 10


class State(StrEnum):
    """The state of a node."""

    WAITING = "waiting"
    RUNNING = "running"
    RESTARTING = "restarting"
    ENDED = "ended"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Outcome:
    """The end of a run."""

    exit_code: int
    reason: str
    seconds: float
    restarts: dict[str, int]
    failed: str | None = None
    """The node that failed and ended the run, such as ``ppo-trainer-0``."""


@dataclass
class _Record:
    """The restarts, errors and last exit code of a task."""

    restarts: int = 0
    errors: int = 0
    lost_nodes: int = 0
    is_node_lost: bool = False
    """True when the first process of a node was killed at the end of the last start."""
    exit_code: int | None = None
    failed_rank: int = 0
    """The node that ended with ``exit_code``."""


Report = Callable[[TaskSpec, int | None, State, str], None]
"""Called with a task, a rank (None: the whole task), the new state and its reason in a few words."""


StartNode = Callable[[TaskSpec, int, IO[bytes]], Awaitable[asyncio.subprocess.Process]]
"""Starts the command of a task's node with its output in the given log; the processes must have the node's mark."""

EndNodes = Callable[[list[str], float, threading.Event], Awaitable[None]]
"""Ends all processes with one of the marks; the rest is as of ``processes.end``."""


class Supervisor:
    """The processes of one run, which it starts, restarts and ends."""

    def __init__(
        self, run: LocalRun, report: Report, start_node: StartNode | None = None, end_nodes: EndNodes | None = None
    ) -> None:
        """Make a supervisor that has not started anything, within a running event loop.

        Args:
            run: the run.
            report: is called at every change of state.
            start_node: starts a node; by default as a process of this machine.
            end_nodes: ends nodes; by default all marked processes of this machine.
        """
        self._run = run
        self._report = report
        self._start_node = start_node or self._start_here
        self._end_nodes: EndNodes = end_nodes or (lambda *ends: asyncio.to_thread(processes.end, *ends))
        self._records = {task.name: _Record() for task in run.group.tasks}
        self._stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._impatient = threading.Event()
        self._ending = False
        self._has_succeeded = False
        self._has_reported_logs = False

    async def run(self) -> Outcome:
        """Run the group to its end, and return when none of its processes is left."""
        started = time.monotonic()
        jobs = {task.name: asyncio.create_task(self._run_task(task), name=task.name) for task in self._run.group.tasks}
        try:
            exit_code, reason, failed = await self._until_over(jobs)
            await self._end(jobs, exit_code)
        finally:
            self._ending = True
            for job in jobs.values():
                job.cancel()
            await asyncio.gather(*jobs.values(), return_exceptions=True)
            await self._end_nodes([self._run.mark], 0, self._impatient)
        restarts = {name: record.restarts for name, record in self._records.items() if record.restarts}
        node = f"{failed}-{self._records[failed].failed_rank}" if failed else None
        return Outcome(exit_code, reason, time.monotonic() - started, restarts, node)

    def stop(self, signal_number: int) -> None:
        """End the run early, the primary tasks first, so that they can write a checkpoint; a second call kills all."""
        if not self._stop.done():
            self._stop.set_result(signal_number)
        else:
            self._impatient.set()

    async def _until_over(self, jobs: dict[str, asyncio.Task[int]]) -> tuple[int, str, str | None]:
        """Wait until the outcome of the run is known, and return exit code, reason and the task that failed."""
        primaries = {task.name for task in self._run.group.tasks if task.is_primary}
        names: dict[asyncio.Future[int], str] = {job: name for name, job in jobs.items()}
        while True:
            done, _ = await asyncio.wait({*names, self._stop}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.done():
                number = self._stop.result()
                return 128 + number, f"stopped by {signal.Signals(number).name}", None
            for job in done:
                name, code = names.pop(job), job.result()
                if code and name in primaries:
                    return code, f"{name} failed with exit code {code}", name
                if code == EXIT_CONFIGURATION:
                    return code, f"{name} cannot run as it is configured (exit code {code})", name
            if all(self._records[name].exit_code == 0 for name in primaries):
                return 0, "done", None

    async def _end(self, jobs: dict[str, asyncio.Task[int]], exit_code: int) -> None:
        """End the running tasks: in order after a success or a request to stop, all at once after a failure."""
        self._ending, self._has_succeeded = True, exit_code == 0
        tasks = self._run.group.tasks
        if self._stop.done():
            primaries = [task for task in tasks if task.is_primary]
            for task in primaries:
                if not jobs[task.name].done():
                    self._report(task, None, State.RUNNING, "asked to stop; Ctrl-C again ends it at once")
            await self._end_tasks(primaries, PRIMARY_STOP_SECONDS)
            await self._end_tasks([task for task in tasks if not task.is_primary], AUXILIARY_END_SECONDS)
        elif exit_code:
            await self._end_tasks(list(tasks), AUXILIARY_END_SECONDS)
        else:
            await asyncio.gather(*(self._end_after_delay(task) for task in tasks if not jobs[task.name].done()))

    async def _end_after_delay(self, task: TaskSpec) -> None:
        # Ctrl-C cuts the delay short; the run has succeeded by then.
        await asyncio.wait({self._stop}, timeout=task.termination_delay)
        await self._end_tasks([task], AUXILIARY_END_SECONDS)

    async def _end_tasks(self, tasks: list[TaskSpec], grace_seconds: float) -> None:
        marks = [self._run.node_mark(task, rank) for task in tasks for rank in range(task.num_nodes)]
        await self._end_nodes(marks, grace_seconds, self._impatient)

    async def _run_task(self, task: TaskSpec) -> int:
        """Run ``task`` with its restarts, and return its last exit code: 0 when all nodes succeeded."""
        record = self._records[task.name]
        while True:
            codes = await self._run_once(task)
            if self._ending:
                return 0
            code = next((code for code in codes if code not in (0, KILLED)), max(codes))
            refusal = self._refuses_restart(task, codes) if code else None
            if not code or refusal:
                record.exit_code, record.failed_rank = code, codes.index(code)
                if code:
                    self._report(task, None, State.FAILED, f"exit code {code}{refusal}")
                return code
            record.restarts += 1
            pause = min(2.0 ** (record.restarts - 1), LONGEST_BACKOFF_SECONDS)
            self._report(task, None, State.RESTARTING, f"exit code {code}; restart {record.restarts} in {pause:.0f} s")
            await asyncio.sleep(pause)
            if self._ending:
                return 0

    def _refuses_restart(self, task: TaskSpec, codes: list[int]) -> str | None:
        """Return why ``task``, whose nodes ended with ``codes``, is not restarted; None if it is."""
        record = self._records[task.name]
        auxiliaries = [other.name for other in self._run.group.tasks if not other.is_primary]
        gone = [name for name in auxiliaries if self._records[name].exit_code]
        if EXIT_CONFIGURATION in codes:
            return ": a restart would fail again"
        if task.is_primary and gone:
            return f": not restarted, since {', '.join(gone)} failed for good"
        if task.recover_on_exit_codes.intersection(codes):
            return None
        if record.is_node_lost and task.recover_on_exit_codes and record.lost_nodes < LOST_NODES:
            record.lost_nodes += 1
            return None
        record.errors += 1
        if record.errors > task.max_restarts_on_errors:
            return f" after {record.errors - 1} of {task.max_restarts_on_errors} restarts on errors"
        return None

    async def _run_once(self, task: TaskSpec) -> list[int]:
        """Run all nodes of ``task`` once, and return their exit codes by rank, 137 if killed for another's failure."""
        leaders = [await self._start(task, rank) for rank in range(task.num_nodes)]
        waits = [asyncio.create_task(leader.wait()) for leader in leaders]
        try:
            pending = set(waits)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(wait.result() for wait in done):
                    break
            killed = {waits.index(wait) for wait in pending}
            ended = {wait.result() for wait in waits if wait.done()}
            self._records[task.name].is_node_lost = -signal.SIGKILL in ended
        finally:
            # No process of this start, of any node, may still run at the next.
            if not self._ending:
                marks = [self._run.node_mark(task, rank) for rank in range(task.num_nodes)]
                await self._end_nodes(marks, 0, self._impatient)
        codes = [shell_code(await wait) for wait in waits]
        for rank, code in enumerate(codes):
            self._report(task, rank, *self._end_of_node(code, is_killed=rank in killed))
        return codes

    def _end_of_node(self, code: int, *, is_killed: bool) -> tuple[State, str]:
        """Return the state of a node that ended with ``code``, and why it has that state."""
        if self._has_succeeded and code in (0, TERMINATED):
            return State.ENDED, "with the run"
        if self._ending or (is_killed and code == KILLED):
            return State.STOPPED, f"exit code {code}"
        return State.FAILED if code else State.ENDED, f"exit code {code}"

    async def _start(self, task: TaskSpec, rank: int) -> asyncio.subprocess.Process:
        path = self._run.log(task, rank)
        log, failure = _open_log(path, self._records[task.name].restarts)
        with log:
            leader = await self._start_node(task, rank, log)
        why = f"pid {leader.pid}"
        if failure is not None and not self._has_reported_logs:
            self._has_reported_logs = True
            why += f"; the run continues, but its logs cannot be written: {path}: {failure.strerror}"
        self._report(task, rank, State.RUNNING, why)
        return leader

    async def _start_here(self, task: TaskSpec, rank: int, log: IO[bytes]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            task.run,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            env=node_environment(self._run, task, rank),
            start_new_session=True,
        )


def _open_log(path: Path, restarts: int) -> tuple[IO[bytes], OSError | None]:
    """Open a node's log and write its first line; return the log, and the error if there was one.

    A log that cannot be opened is replaced by the null device; any other is written again once there is space.
    """
    what = f"restart {restarts}" if restarts else "start"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log: IO[bytes] = path.open("ab", buffering=0)
    except OSError as error:
        return open(os.devnull, "wb"), error
    try:
        log.write(f"{START_MARK}{time.strftime('%Y-%m-%d %H:%M:%S')} {what} ===\n".encode())
    except OSError as error:
        return log, error
    return log, None
