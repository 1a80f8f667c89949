"""The embedded engine, made slower by a known factor: every turn of its model takes BENCHMARK_SLOWDOWN times as long.

The time is slept, not computed, as that of an engine on another machine would be. It is inside the engine, so whatever
waits for its running requests, such as new weights, waits for them as long as for a slow engine's.
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
from services.embedded_engine.compute.batch import Batch


def slowed(compute: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """``compute``, ``factor`` times as slow."""

    @wraps(compute)
    def slow(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = compute(*arguments, **named)
        time.sleep((factor - 1) * (time.perf_counter() - began))
        return result

    return slow


def serve() -> None:
    """Runs the engine."""
    factor = float(os.environ[FACTOR])
    for name in ("admit", "decode"):
        setattr(Batch, name, slowed(getattr(Batch, name), factor))
    main()


if __name__ == "__main__":
    sys.exit(exit_code_of(serve))
