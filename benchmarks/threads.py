"""Measure how threads and their waits cost training and engine, on an idle and on a busy machine.

    python -m benchmarks.threads [--rounds 2] [--quick] [--json FILE]

OpenMP's threads meet at a barrier after each product. libgomp, which PyTorch brings on Linux, lets a thread that waits
there spin for about a millisecond before it sleeps, unless OMP_WAIT_POLICY or GOMP_SPINCOUNT says otherwise. On a busy
machine the thread that the others wait for has no core, so they spin away the time that it needs. Each side is a run of
the job group with one node of each task; two busy loops stand for other programs. The first step warms up and is left
out.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import harness
from benchmarks.common.harness import ROOT, spread
from benchmarks.common.job import JOB_GROUP, QUESTIONS, run_job
from services.core.machine import cores

NODES = {"ppo-trainer": 1, "rollout-server": 1}
PHASES = {"train": "seconds_train", "generate": "seconds_generate"}
CHOICES = {  # The count wins over OMP_WAIT_POLICY, which the local runner sets.
    "one thread": {"OMP_NUM_THREADS": "1"},
    "libgomp's own": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"GOMP_SPINCOUNT": "0"},
    "1,000 spins": {"GOMP_SPINCOUNT": "1000"},
    "10,000 spins": {"GOMP_SPINCOUNT": "10000"},
}
SETTINGS = {
    "BATCH_SIZE": "8",
    "GROUP_SIZE": "8",
    "MAX_NEW_TOKENS": "8",
    "ROLLOUT_ENGINE": "embedded",
    "SHARD_PARAMETERS": "false",
    "MIN_WORKERS": "1",
}
TINY = {"ARITHMETIC_TEMPLATE": "{a}{op}{b}="}
"""The questions that the tiny model can read."""
LOOP = "while True: pass"


@dataclass
class Choice:
    """A way of computing, and what its runs took."""

    name: str
    settings: dict[str, str]
    loops: int
    """Busy loops beside it."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    """Seconds of each step after the first, by phase."""


@contextmanager
def load(loops: int) -> Iterator[None]:
    """Keep the machine busy with this many loops while the context lasts."""
    processes = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            harness.end(process)


def measure(choice: Choice) -> str:
    """Run a job group once, and return its medians as text."""
    with load(choice.loops):
        lines = run_job(JOB_GROUP, QUESTIONS | SETTINGS | choice.settings, NODES)[1:]
    for phase, name in PHASES.items():
        choice.seconds[phase] += [line[name] for line in lines]
    medians = {phase: statistics.median(line[name] for line in lines) for phase, name in PHASES.items()}
    return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in medians.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("threads", rounds=2, quick="one round, the tiny model alone")
    parser.add_argument("--model", default=".cache/models/smollm2-135m")
    parser.add_argument("--steps", type=int, default=6, help="steps of a run, the first of which warms up")
    given = parser.parse(arguments)
    tables, results = [], {}
    with tempfile.TemporaryDirectory() as directory:
        tiny = Path(directory) / "tiny"
        subprocess.run([sys.executable, "-m", "scripts.tiny_model", str(tiny)], cwd=ROOT, check=True)
        tasks = {"tiny": TINY | {"MODEL_NAME": str(tiny)}}
        if not given.quick:
            tasks[given.model] = {"MODEL_NAME": given.model}
        for name, task in tasks.items():
            for state, loops in {"idle": 0, "busy": cores()}.items():
                work = task | {"MAX_STEPS": str(given.steps)}
                sides = [Choice(title, work | settings, loops) for title, settings in CHOICES.items()]
                harness.in_turn(sides, given.rounds, measure)
                rows = [(side.name, *(spread(side.seconds[phase], 3) for phase in PHASES)) for side in sides]
                tables.append(harness.table(f"{name}, {state}, {cores()} cores", ("", *PHASES), rows))
                results[f"{name}, {state}"] = {side.name: side.seconds for side in sides}
    harness.finish(given, tables, results)


if __name__ == "__main__":
    main()
