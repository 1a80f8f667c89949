"""Processes: children that are started and stopped, and stale ones of an earlier start on the same node.

A child leads a session and process group of its own. So a signal from a terminal reaches its parent only, and
the processes that it started end with it.

With ``job_recovery: {strategy: FAILOVER}`` SkyPilot starts a task again on the pods that are still there. The processes
of the task's other nodes got SIGTERM when one node failed, and get SIGKILL 30 s later, so that a new start may find
their ports, GPU memory and locks in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.core.child import LAUNCHER_VARIABLE
from services.core.errors import ConfigurationError

CHILD = Path(__file__).with_name("child.py")
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Command:
    """The command of a child process that runs a Python module, and that ends when its parent ends."""

    name: str
    python: str
    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    withheld: Sequence[str] = ()
    """Variables of this process that the child does not get."""

    @property
    def line(self) -> list[str]:
        """The whole command line."""
        return [self.python, str(CHILD), self.module, *self.arguments]

    def variables(self) -> dict[str, str]:
        """Return the child's environment variables if this process starts it."""
        inherited = {name: value for name, value in os.environ.items() if name not in self.withheld}
        return {**inherited, **self.environment, LAUNCHER_VARIABLE: str(os.getpid())}

    async def start(self, **pipes: Any) -> asyncio.subprocess.Process:
        """Start the child, without input unless ``pipes``, arguments of create_subprocess_exec, give it one."""
        pipes = {"stdin": asyncio.subprocess.DEVNULL, **pipes}
        return await asyncio.create_subprocess_exec(*self.line, env=self.variables(), start_new_session=True, **pipes)


def stop_signals() -> set[signal.Signals]:
    """Return the signals that ask a program to end: Ctrl-C, SIGTERM, and a hang-up unless it started under nohup."""
    numbers = {signal.SIGINT, signal.SIGTERM}
    return numbers if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else {*numbers, signal.SIGHUP}


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; return whether it had a process. Signal 0 only asks."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS refuses to signal a group of zombies.
        return False
    return True


async def end_group(process: asyncio.subprocess.Process, grace_seconds: float, *, whole: bool = False) -> None:
    """End a child by SIGTERM, then whatever is left of its process group by SIGKILL, even if this is cancelled.

    Args:
        process: the child. If it has ended already, the rest of its group gets no SIGTERM.
        grace_seconds: the time between the two signals.
        whole: whether SIGTERM goes to the whole group, and the time lasts until no process of it is left. Otherwise
            SIGTERM goes to the child alone, which ends its own children, and the time lasts until the child has ended.
    """
    try:
        if process.returncode is None:
            # Not asyncio.timeout, which Python 3.11.2 takes for a cancellation of this task that came before.
            deadline = time.monotonic() + grace_seconds
            with contextlib.suppress(ProcessLookupError):
                signal_group(process.pid, signal.SIGTERM) if whole else process.terminate()
            while signal_group(process.pid, 0) if whole else process.returncode is None:
                if time.monotonic() >= deadline:
                    break
                await asyncio.sleep(POLL_SECONDS)
    finally:
        signal_group(process.pid, signal.SIGKILL)


def end_all(processes: Sequence[subprocess.Popen[Any]], grace_seconds: float) -> None:
    """End processes by SIGTERM, after ``grace_seconds`` for all of them by SIGKILL, and return when none runs."""
    deadline = time.monotonic() + grace_seconds
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def describe_exit(code: int) -> str:
    """Return a process's return code in words."""
    return f"exited with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def shell_code(code: int) -> int:
    """Return a process's return code as a shell has it: 128 + n for a process that signal n ended."""
    return 128 - code if code < 0 else code


GRACE_SECONDS = 10.0
"""The time for stale processes to end by themselves, because SkyPilot has sent them SIGTERM."""
KILL_SECONDS = 10.0
STALE_POLL_SECONDS = 0.1
_SAME = ("SKYPILOT_TASK_ID", "SKYPILOT_NODE_RANK")


def kill_stale_processes(grace_seconds: float = GRACE_SECONDS) -> None:
    """Wait until no other process of this node runs this process's module for the same task, and kill those that stay.

    Does nothing outside a job group, and where there is no /proc. The first process of a node calls it before it takes
    ports or memory; its ancestors are spared.

    Args:
        grace_seconds: the time before stale processes are killed.

    Raises:
        ConfigurationError: a stale process does not end, not even by SIGKILL.
    """
    started = time.monotonic()
    while pids := list(_stale_processes()):
        waited = time.monotonic() - started
        if waited > grace_seconds + KILL_SECONDS:
            raise ConfigurationError(f"processes {pids} of an earlier start do not end; restart the node")
        if waited >= grace_seconds:
            from services.core.logs import get_logger  # not above: the local runner starts without structlog

            get_logger(__name__).warning("killing processes of an earlier start", pids=pids)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(STALE_POLL_SECONDS)


def _stale_processes() -> Iterator[int]:
    """Yield the processes other than this one and its ancestors with the same module, task and node."""
    module = _module(sys.orig_argv)
    if module is None or not all(name in os.environ for name in _SAME) or not os.path.isdir("/proc/self"):
        return
    spared = {os.getpid(), *_ancestors()}
    variables = {f"{name}={os.environ[name]}" for name in _SAME}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        # Gone meanwhile, or another user's.
        with contextlib.suppress(OSError):
            # A zombie has no command.
            is_same = int(name) not in spared and _module(_strings(name, "cmdline")) == module
            if is_same and variables <= set(_strings(name, "environ")):
                yield int(name)


def _module(command: list[str]) -> str | None:
    """Return the module of ``python -m module``."""
    return command[command.index("-m") + 1] if "-m" in command[:-1] else None


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    while pid > 0:
        yield pid
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            # The name in parentheses may have spaces; state and parent follow it.
            pid = int(file.read().rpartition(")")[2].split()[1])


def _strings(pid: str, name: str) -> list[str]:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read().decode(errors="replace").split("\0")[:-1]
