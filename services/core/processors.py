"""The processor cores of this node, and the number of threads that a process computes with."""

from __future__ import annotations

import os

from services.core.endpoints import NODE_RANK_VARIABLE

CORES_VARIABLE = "SKYPILOT_POD_CPU_CORE_LIMIT"
"""SkyPilot's variable with the cores that a pod asks for. The machine below a pod has more, which other pods use."""
THREADS_VARIABLE = "OMP_NUM_THREADS"
RAY_THREADS = "1"
"""The number of threads that Ray gives to every command of SkyPilot, whatever the number of cores."""


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    promised = os.environ.get(CORES_VARIABLE)
    return min(allowed, max(1, int(float(promised)))) if promised else allowed


def threads(*, processes: int = 1) -> int:
    """Return the number of threads that one process computes with: OMP_NUM_THREADS, else its share of the cores.

    On SkyPilot's nodes a value of 1 is Ray's and says nothing about the cores.

    Args:
        processes: processes of this node that compute at the same time and share the cores.
    """
    given = os.environ.get(THREADS_VARIABLE)
    if given and not (given == RAY_THREADS and NODE_RANK_VARIABLE in os.environ):
        return int(given)
    return max(1, cores() // processes)
