"""The embedded engine, slowed down: every call of its model takes BENCHMARK_SLOWDOWN times as long.

The engine sleeps for the added time, so that it takes no more of the processor, like an engine on another machine. The
sleep is inside the engine, so new weights wait for running requests as long as they would wait for a slow engine's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from benchmarks.common.slow_rollouts import FACTOR
from services.core.errors import exit_code_of
from services.embedded_engine.__main__ import main
from services.embedded_engine.compute.scheduler import Scheduler


def slowed(compute: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """Return a function that computes the same and takes ``factor`` times as long."""

    @wraps(compute)
    def slow(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = compute(*arguments, **named)
        time.sleep((factor - 1) * (time.perf_counter() - began))
        return result

    return slow


def serve() -> None:
    """Run the engine."""
    factor = float(os.environ[FACTOR])
    for name in ("admit", "decode"):
        setattr(Scheduler, name, slowed(getattr(Scheduler, name), factor))
    main()


if __name__ == "__main__":
    sys.exit(exit_code_of(serve))
