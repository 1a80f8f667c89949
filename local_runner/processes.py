"""The processes of a run: found by a mark in their environment, and ended together.

A node's command may start further processes, in sessions of their own (the trainer does), and may die before them. All
inherit the mark, so they are found even when their parents are gone.

As a program (``python -m local_runner.processes MARK SECONDS``) this module is a watchdog of the program that started
it, which holds the other end of its standard input and never writes to it. The input ends when that program ends, even
by SIGKILL; then the watchdog ends the processes that are left, which have so many seconds from SIGTERM to SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import psutil

from services.core.processes import signal_group

MARK = "LOCAL_RUN_MARK"
"""The environment variable whose value is ``<run mark>/<task>-<rank>``."""

POLL_SECONDS = 0.05
EXEC_SECONDS = 0.02
KILL_SECONDS = 10.0
GRACE_SECONDS = 5.0
"""The time that the processes of a killed runner have to end after SIGTERM."""


def marked(*prefixes: str) -> list[psutil.Process]:
    """Return the live processes marked with a prefix or below one, and their descendants, without this process."""
    below = tuple(f"{prefix}/" for prefix in prefixes)
    found: dict[int, psutil.Process] = {}
    candidates = [process for process in psutil.process_iter() if process.pid != os.getpid()]
    while candidates:
        without_environment = []
        for process in candidates:
            with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or another user's
                if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                environment = process.environ()
                if f"{environment.get(MARK, '')}/".startswith(below):
                    # A child may have overwritten its environment, as setproctitle does.
                    found.update({one.pid: one for one in (process, *process.children(recursive=True))})
                elif not environment:
                    without_environment.append(process)
        # A process has no environment for a moment in the middle of an exec; one may also have none for good.
        candidates = without_environment if len(without_environment) < len(candidates) else []
        if candidates:
            time.sleep(EXEC_SECONDS)
    return list(found.values())


def end(prefixes: Sequence[str], grace_seconds: float, hurry: threading.Event | None = None) -> None:
    """End all marked processes, and return when none is left.

    SIGTERM goes to the process groups of the topmost processes, which end their children. After ``grace_seconds``, or
    at once if they are 0, SIGKILL goes to every process that is left.

    Args:
        prefixes: the marks.
        grace_seconds: the time between SIGTERM and SIGKILL.
        hurry: ends that time early once it is set.

    Raises:
        RuntimeError: a process could not be killed.
    """
    running = marked(*prefixes)
    if grace_seconds > 0:
        _terminate_groups(running)
        hurry = hurry or threading.Event()
        deadline = time.monotonic() + grace_seconds
        while (running := [process for process in running if _runs(process)]) and time.monotonic() < deadline:
            if hurry.wait(POLL_SECONDS):
                break
    deadline = time.monotonic() + KILL_SECONDS
    # Look again each time, because a process that was asked to end may have started others.
    while running := marked(*prefixes):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {[process.pid for process in running]} do not end, not even by SIGKILL")
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_SECONDS)


def _terminate_groups(running: Sequence[psutil.Process]) -> None:
    pids = {process.pid for process in running}
    groups = set()
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if process.ppid() not in pids:
                groups.add(os.getpgid(process.pid))
    for group in groups - {os.getpgrp()}:
        signal_group(group, signal.SIGTERM)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def guard(mark: str) -> Iterator[None]:
    """End the processes marked ``mark`` even if this process is killed within the context."""
    command = [sys.executable, "-m", "local_runner.processes", mark, str(GRACE_SECONDS)]
    environment_without_mark = {name: value for name, value in os.environ.items() if name != MARK}
    # When the context is left, the watchdog's input closes; it then finds nothing to end, and ends itself.
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment_without_mark, start_new_session=True):
        yield


def main() -> None:
    """Wait for the end of the program that started this one, then end the processes that are left."""
    # That program handles Ctrl-C and hang-ups.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end([sys.argv[1]], float(sys.argv[2]))


if __name__ == "__main__":
    main()
