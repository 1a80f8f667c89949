"""A rollout node whose embedded engine takes BENCHMARK_SLOWDOWN times as long for every call of its model.

The engine sleeps for the added time, so that it takes no more of the processor, like an engine on another machine. The
sleep is inside the engine, so new weights wait for running requests as long as they would wait for a slow engine's. The
node's process starts this module again as its engine, with the address to listen on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import ModuleType
from typing import Any

from services.core.errors import exit_code_of

FACTOR = "BENCHMARK_SLOWDOWN"


def slowed(compute: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """Return a function that computes the same and takes ``factor`` times as long."""

    @wraps(compute)
    def slow(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = compute(*arguments, **named)
        time.sleep((factor - 1) * (time.perf_counter() - began))
        return result

    return slow


def run_engine() -> None:
    """Run the engine."""
    from services.embedded_engine import __main__ as engine

    import_usual = engine.import_application

    def import_slow() -> ModuleType:
        # First the application: it imports transformers without torch, which the scheduler imports.
        application = import_usual()
        from services.embedded_engine.compute.scheduler import Scheduler

        for name in ("admit", "decode"):
            setattr(Scheduler, name, slowed(getattr(Scheduler, name), float(os.environ[FACTOR])))
        return application

    engine.import_application = import_slow
    engine.main()


def run_node() -> None:
    """Run the rollout node."""
    from services.engines.engine import Embedded
    from services.rollout_server.__main__ import main

    usual = Embedded.command
    Embedded.command = lambda *of: replace(usual(*of), module="benchmarks.slow_rollouts")  # type: ignore[method-assign]
    main()


if __name__ == "__main__":
    sys.exit(exit_code_of(run_engine if "--port" in sys.argv else run_node))
