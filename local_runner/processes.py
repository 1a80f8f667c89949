"""The processes of a run: found by a mark in their environment, ended together, and their memory measured.

A node's command may start further processes, in sessions of their own (torchrun does), and may die before them. All
inherit the mark, so they are found even when their parents are gone.
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
"""The environment variable whose value is ``<run mark>/<task>-<rank>``."""

POLL_SECONDS = 0.05
KILL_SECONDS = 10.0


def marked(prefix: str) -> list[psutil.Process]:
    """Return the live processes whose mark is ``prefix`` or below it, and their descendants, without this process."""
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
                # A child may have overwritten its environment, as setproctitle does.
                found.update((child.pid, child) for child in process.children(recursive=True))
        except (psutil.Error, OSError):  # gone meanwhile, or another user's
            continue
    return list(found.values())


def end(prefixes: Sequence[str], grace_seconds: float) -> None:
    """End all marked processes, and return when none is left.

    SIGTERM goes to the process groups of the topmost processes, which end their children. After ``grace_seconds``, or
    at once if they are 0, SIGKILL goes to every process that is left.

    Raises:
        RuntimeError: a process could not be killed.
    """
    running = _all_marked(prefixes)
    if grace_seconds > 0:
        _terminate_groups(running)
        deadline = time.monotonic() + grace_seconds
        while (running := [process for process in running if _runs(process)]) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + KILL_SECONDS
    # Look again each time, because a process that was asked to end may have started others.
    while running := _all_marked(prefixes):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {[process.pid for process in running]} do not end, not even by SIGKILL")
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_SECONDS)


class MemoryMeter:
    """The memory of this process's descendants, by node.

    On Linux, pages that several processes share count once (PSS). Measuring PSS stops a process for some 50 ms a
    gigabyte, because the kernel walks through all pages. So it is measured when a node has grown by the factor
    ``MEASURE_AFTER``; until then the node's share of its files and shared memory is taken to be unchanged.
    """

    MEASURE_AFTER = 1.05

    def __init__(self) -> None:
        self.peak = 0
        """Highest memory of all nodes together, in bytes."""
        self.peak_by_node: dict[str, int] = {}
        self._nodes: dict[psutil.Process, str] = {}
        self._measured: dict[str, int] = {}
        self._own_part: dict[str, float] = {}
        """The node's share of the pages that may be shared, at the last measurement."""

    def measure(self) -> int:
        """Return the bytes that all nodes together use now."""
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
            if used[node] > self.MEASURE_AFTER * self._measured.get(node, 0):
                used[node] = self._measured[node] = _proportional(processes[node])
                self._own_part[node] = max(used[node] - private[node], 0) / max(shared[node], 1)
        for node in used:
            self.peak_by_node[node] = max(used[node], self.peak_by_node.get(node, 0))
        self.peak = max(self.peak, sum(used.values()))
        return sum(used.values())

    def _node_of(self, process: psutil.Process) -> str:
        # Before exec a child still has its parent's environment, perhaps without a mark.
        node = self._nodes.get(process) or process.environ().get(MARK, "").partition("/")[2]
        if node:
            self._nodes[process] = node
        return node


def _proportional(processes: Iterable[psutil.Process]) -> int:
    """Return the PSS of all processes together, in bytes."""
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
