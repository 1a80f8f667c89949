"""Measurements of this project against its alternatives: ``python -m benchmarks NAME``."""

from __future__ import annotations

import sys

_MOVED = {"asynchronous": "async", "environment_server": "services --only environment-server"} | {
    name: name for name in ("step", "reward", "rollouts", "trainer", "services", "gateway", "policy", "gpu")
}

if sys.argv[:1] == ["-m"]:
    # `python -m benchmarks.NAME` imports this package first. It was the command of each benchmark before.
    _asked = next((word for word in sys.orig_argv if "benchmarks." in word), "").rpartition("benchmarks.")[2]
    if _asked in _MOVED:
        raise SystemExit(f"error: `python -m benchmarks.{_asked}` is now `python -m benchmarks {_MOVED[_asked]}`")
