"""Measure the imports of each program of a job group, beside those of the libraries that it cannot do without.

    python -m benchmarks.start [--rounds 3] [--quick] [--json FILE]

Each measurement is a new process. Processor seconds depend little on what else the machine does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.common import harness
from benchmarks.common.harness import ROOT

WEB = "import fastapi, uvicorn, httpx, structlog, pydantic_settings"
ENGINE = "from services.embedded_engine.__main__ import import_application; import_application()"
RANK = "from services.core.imports import pause_collection\nwith pause_collection(): import trainer.run"


@dataclass
class Program:
    """Imports, and what they cost in each round."""

    name: str
    code: str
    seconds: list[float] = field(default_factory=list)
    """Processor seconds, user and system."""
    faults: int = 0
    """Page faults of the last round."""
    megabytes: float = 0.0
    """Resident memory of the last round at its peak."""


def programs() -> list[Program]:
    """Return the programs of the job group, and the libraries alone."""
    services = ("data_server", "reward_server", "replay_buffer", "rollout_server", "gateway", "environment_server")
    return [
        Program("Python alone", "pass"),
        Program("libraries of a service", WEB),
        *(Program(name.replace("_", "-"), f"import services.{name}.__main__") for name in services),
        Program("torch alone", "import torch"),
        Program("embedded engine", ENGINE),
        Program("torch, FSDP, AutoModel alone", "import torch.distributed.fsdp\nfrom transformers import AutoModel"),
        Program("a trainer's rank", RANK),
        Program("a trainer's launcher", "import trainer.__main__"),
        Program("local runner", "import local_runner.run"),
    ]


def measure(program: Program) -> str:
    """Run the program's imports in a new process."""
    process = subprocess.Popen([sys.executable, "-c", program.code], cwd=ROOT)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"error: the imports of {program.name} ended with {process.returncode}")
    program.seconds.append(used.ru_utime + used.ru_stime)
    program.faults = used.ru_minflt
    # getrusage counts kibibytes on Linux and bytes on macOS.
    program.megabytes = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    return f"{program.seconds[-1]:.2f} s"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    given = harness.CommandLine("start", rounds=3, quick="one round").parse(arguments)
    measured = programs()
    for program in measured:
        # Once before the rounds, which writes the bytecode and fills the file cache.
        measure(program)
        program.seconds.clear()
    harness.in_turn(measured, given.rounds, measure)
    rows = [
        (program.name, harness.spread(program.seconds), f"{program.faults:,}", f"{program.megabytes:.0f}")
        for program in measured
    ]
    columns = ("imports of", "processor seconds", "page faults", "MB")
    harness.finish(given, [harness.table("start of each program, up to its imports", columns, rows)], measured)


if __name__ == "__main__":
    main()
