"""Processes of one run: found by a mark in their environment, ended as a whole, measured together.

A node's command may start further processes, in sessions of their own (torchrun does), and may die before them. All
inherit the mark, so they are found whatever became of their parents.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
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
    """Measures the memory of this process's descendants, by node.

    Pages that several processes share count once where the system tells (Linux's PSS). Asking for that makes it walk
    through all pages while the process waits, some 50 ms a gigabyte; so a node is asked when it has grown by
    ``ASK_AFTER``, and meanwhile the same part of its files and shared memory is taken to be its own.
    """

    ASK_AFTER = 1.05

    def __init__(self) -> None:
        self.peak = 0
        """The most that all had together, in bytes."""
        self.peak_by_node: dict[str, int] = {}
        self._nodes: dict[psutil.Process, str] = {}
        self._asked: dict[str, int] = {}
        self._own_part: dict[str, float] = {}
        """Of the pages that may be shared, how many count as the node's, when last asked."""

    def measure(self) -> int:
        """Bytes that all have together now."""
        processes: dict[str, list[psutil.Process]] = {}
        private: Counter[str] = Counter()
        shared: Counter[str] = Counter()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile
                node, memory = self._node_of(child), child.memory_info()
                processes.setdefault(node, []).append(child)
                may_be_shared = memory.shared if psutil.LINUX else 0
                private[node] += memory.rss - may_be_shared
                shared[node] += may_be_shared
        used = {node: private[node] + int(shared[node] * self._own_part.get(node, 1.0)) for node in processes}
        for node in used if psutil.LINUX else ():
            if used[node] > self.ASK_AFTER * self._asked.get(node, 0):
                used[node] = self._asked[node] = _proportional(processes[node])
                self._own_part[node] = max(used[node] - private[node], 0) / max(shared[node], 1)
        for node in used:
            self.peak_by_node[node] = max(used[node], self.peak_by_node.get(node, 0))
        self.peak = max(self.peak, sum(used.values()))
        return sum(used.values())

    def _node_of(self, process: psutil.Process) -> str:
        # A process that is not yet what it is to be has its parent's environment, with the mark or without.
        node = self._nodes.get(process) or process.environ().get(MARK, "").partition("/")[2]
        if node:
            self._nodes[process] = node
        return node


def _proportional(processes: Iterable[psutil.Process]) -> int:
    """PSS of all together, in bytes."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            total += process.memory_full_info().pss
    return total


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
