"""Processes of one run: found by a mark in their environment, ended as a whole, measured together.

A node's command may start further processes, in sessions of their own (torchrun does), and may die before them. All
inherit the mark, so they are found whatever became of their parents.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence

import psutil

MARK = "LOCAL_RUN_MARK"
"""Environment variable; its value is ``<run mark>/<task>-<rank>``."""

POLL_SECONDS = 0.05
KILL_SECONDS = 10.0


def marked(prefix: str) -> list[psutil.Process]:
    """Every live process whose mark is ``prefix`` or below it, and every descendant of one; not this process."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.uids().real != os.getuid():
                continue
            mark = process.environ().get(MARK, "")
            if (mark == prefix or mark.startswith(prefix + "/")) and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process
                # A process may have overwritten its environment (setproctitle does); its parent still tells.
                found.update((child.pid, child) for child in process.children(recursive=True))
        except (psutil.Error, OSError):  # gone meanwhile, or not ours to look at
            continue
    return list(found.values())


def end(prefixes: Sequence[str], grace_seconds: float) -> None:
    """Ends everything marked and returns when nothing of it is left.

    SIGTERM goes to the process groups of the topmost processes, whose business their children are; SIGKILL, after
    ``grace_seconds``, to whatever is left. Without grace there is only the latter.

    Raises:
        RuntimeError: something could not be killed.
    """
    running = _all_marked(prefixes)
    if grace_seconds > 0:
        _terminate_groups(running)
        deadline = time.monotonic() + grace_seconds
        while (running := [process for process in running if _runs(process)]) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + KILL_SECONDS
    # Look again each time: what was asked to end may have started others.
    while running := _all_marked(prefixes):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {[process.pid for process in running]} do not end, not even by SIGKILL")
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_SECONDS)


class MemoryMeter:
    """Measures the memory of this process's descendants, by node. Shared pages count once where the system tells."""

    def __init__(self) -> None:
        self.peak = 0
        """The most that all had together, in bytes."""
        self.peak_by_node: dict[str, int] = {}
        self._nodes: dict[psutil.Process, str] = {}

    def measure(self) -> int:
        """Bytes that all have together now."""
        children = psutil.Process().children(recursive=True)
        self._nodes = {child: node for child, node in self._nodes.items() if child in set(children)}
        now: dict[str, int] = {}
        for child in children:
            try:
                info = child.memory_full_info() if psutil.LINUX else child.memory_info()
                if child not in self._nodes:
                    self._nodes[child] = child.environ().get(MARK, "").partition("/")[2]
            except (psutil.Error, OSError):  # gone meanwhile
                continue
            node = self._nodes[child]
            now[node] = now.get(node, 0) + (getattr(info, "pss", 0) or info.rss)
        for node, used in now.items():
            self.peak_by_node[node] = max(used, self.peak_by_node.get(node, 0))
        self.peak = max(self.peak, sum(now.values()))
        return sum(now.values())


def _all_marked(prefixes: Iterable[str]) -> list[psutil.Process]:
    return [process for prefix in prefixes for process in marked(prefix)]


def _terminate_groups(running: Sequence[psutil.Process]) -> None:
    pids = {process.pid for process in running}
    groups = set()
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if process.ppid() not in pids:
                groups.add(os.getpgid(process.pid))
    for group in groups - {os.getpgrp()}:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
