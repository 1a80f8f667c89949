"""Processes that an earlier start of a task left on its node.

With ``job_recovery: {strategy: FAILOVER}`` SkyPilot starts a task again on the pods that are still there. The processes
of the task's other nodes got SIGTERM when one node failed, and get SIGKILL 30 s later, so that a new start may find
their ports, GPU memory and locks taken.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

from services.core.errors import ConfigurationError
from services.core.logs import get_logger

log = get_logger(__name__)

GRACE_SECONDS = 10.0
"""The time for leftovers to end by themselves, since they have been asked to."""
KILL_SECONDS = 10.0
POLL_SECONDS = 0.1
_SAME = ("SKYPILOT_TASK_ID", "SKYPILOT_NODE_RANK")


def end_leftovers(grace_seconds: float = GRACE_SECONDS) -> None:
    """Wait until no other process of this node runs this process's module for the same task, and kill those that stay.

    Does nothing outside a job group, and where there is no /proc. The first process of a node calls it before it takes
    ports or memory; its ancestors are spared.

    Args:
        grace_seconds: the time before leftovers are killed.

    Raises:
        ConfigurationError: a leftover does not end, not even by SIGKILL.
    """
    started = time.monotonic()
    while left := list(_leftovers()):
        waited = time.monotonic() - started
        if waited > grace_seconds + KILL_SECONDS:
            raise ConfigurationError(f"processes {left} of an earlier start do not end; restart the node")
        if waited >= grace_seconds:
            log.warning("killing what an earlier start left", pids=left)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _leftovers() -> Iterator[int]:
    """Yield the processes other than this one and its ancestors with the same module, task and node."""
    module = _module(sys.orig_argv)
    if module is None or not all(name in os.environ for name in _SAME) or not os.path.isdir("/proc/self"):
        return
    mine = {os.getpid(), *_ancestors()}
    wanted = {f"{name}={os.environ[name]}" for name in _SAME}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        # Gone meanwhile, or another user's.
        with contextlib.suppress(OSError):
            # A zombie has no command.
            is_same = int(name) not in mine and _module(_strings(name, "cmdline")) == module
            if is_same and wanted <= set(_strings(name, "environ")):
                yield int(name)


def _module(command: list[str]) -> str | None:
    """Return the module of ``python -m module``."""
    return command[command.index("-m") + 1] if "-m" in command[:-1] else None


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    while pid > 0:
        yield pid
        with open(f"/proc/{pid}/stat") as file:
            # The name in parentheses may have spaces; state and parent follow it.
            pid = int(file.read().rpartition(")")[2].split()[1])


def _strings(pid: str, name: str) -> list[str]:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read().decode(errors="replace").split("\0")[:-1]
