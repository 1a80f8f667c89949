"""A rollout node whose engine is ``slow_engine.py``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.common.harness import ROOT
from services.core.endpoints import Endpoint
from services.core.errors import exit_code_of
from services.rollout_server import commands
from services.rollout_server.__main__ import main
from services.rollout_server.commands import Command, engine_command
from services.rollout_server.settings import EngineKind, RolloutSettings

FACTOR = "BENCHMARK_SLOWDOWN"
"""The environment variable with the slowdown of the engine."""

COMMAND = "exec python -m services.rollout_server\n"


def job_group_with_slow_rollouts(job_group: str, slowdown: float, directory: Path) -> Path:
    """Write a copy of a job group's YAML whose rollout nodes run this module, and return its path."""
    text = (ROOT / job_group).read_text()
    if COMMAND not in text:
        raise SystemExit(f"error: {job_group} starts its rollout nodes by another command than {COMMAND.strip()!r}")
    path = directory / job_group
    command = f"exec env {FACTOR}={slowdown} python -m benchmarks.common.slow_rollouts\n"
    path.write_text(text.replace(COMMAND, command))
    return path


def _slow_command(settings: RolloutSettings, kind: EngineKind, address: Endpoint) -> Command:
    return replace(engine_command(settings, kind, address), module="benchmarks.common.slow_engine")


if __name__ == "__main__":
    commands.engine_command = _slow_command
    sys.exit(exit_code_of(main))
