"""The costs of processes: imports at their start, and threads that wait."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.table import Table

from benchmarks import harness, models
from benchmarks.harness import MODEL, ROOT, Benchmark, Given, Option, Side
from benchmarks.job import JOB_GROUP, QUESTIONS, run_job
from services.core.machine import cores

WEB = "import fastapi, uvicorn, httpx, structlog, pydantic_settings"
ENGINE = "from services.embedded_engine.__main__ import import_application; import_application()"
RANK = "from services.core.imports import pause_collection\nwith pause_collection(): import trainer.run"
SERVICES = ("data_server", "reward_server", "replay_buffer", "rollout_server", "gateway", "environment_server")
PROGRAMS = {
    "Python alone": "pass",
    "libraries of a service": WEB,
    **{name.replace("_", "-"): f"import services.{name}.__main__" for name in SERVICES},
    "torch alone": "import torch",
    "embedded engine": ENGINE,
    "torch, FSDP, AutoModel alone": "import torch.distributed.fsdp\nfrom transformers import AutoModel",
    "a trainer's rank": RANK,
    "a trainer's launcher": "import trainer.__main__",
    "local runner": "import local_runner.run",
}
"""The imports of each program of the job group, and of the libraries alone."""

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


def import_once(code: str, _round: int = 0) -> dict[str, float]:
    """Run a program's imports in a new process.

    ``seconds`` are of the processor, user and system; ``megabytes`` is resident memory at its peak.
    """
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"error: the imports {code!r} ended with {process.returncode}")
    # getrusage counts kibibytes on Linux and bytes on macOS.
    megabytes = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    return {"seconds": used.ru_utime + used.ru_stime, "faults": used.ru_minflt, "megabytes": megabytes}


def measure_start(given: Given) -> list[Side]:
    """Measure the imports of each program of a job group, next to those of the libraries that it cannot do without.

    Each measurement is a new process. Processor seconds depend little on what else the machine does.
    """
    for code in PROGRAMS.values():
        import_once(code)
    return harness.in_turn([Side(name, partial(import_once, code)) for name, code in PROGRAMS.items()], given.rounds)


def start_tables(_given: Given, sides: Sequence[Side]) -> list[Table]:
    """Return processor seconds, and page faults and memory of the last round."""
    columns: harness.Columns = {
        "imports of": harness.name_of,
        "processor seconds": lambda side: side.spread("seconds"),
        "page faults": lambda side: f"{side.rounds[-1]['faults']:,}",
        "MB": lambda side: f"{side.rounds[-1]['megabytes']:.0f}",
    }
    return [harness.table("start of each program, up to its imports", sides, columns)]


START = Benchmark(
    measure=measure_start,
    tables=start_tables,
    rounds=3,
)


@contextmanager
def load(loops: int) -> Iterator[None]:
    """Keep the machine busy with this many loops while the context lasts."""
    processes = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            harness.end(process)


def run_steps(settings: Mapping[str, str], loops: int, _round: int) -> dict[str, list[float]]:
    """Run a job group next to busy loops, and return the seconds of each step after the first, by phase."""
    with load(loops):
        lines = run_job(JOB_GROUP, QUESTIONS | SETTINGS | dict(settings), NODES)[1:]
    return {phase: [line[name] for line in lines] for phase, name in PHASES.items()}


def measure_threads(given: Given) -> list[Side]:
    """Measure how threads and their waits cost training and engine, on an idle and on a busy machine.

    OpenMP's threads meet at a barrier after each product. libgomp, which PyTorch brings on Linux, lets a thread that
    waits there spin for about a millisecond before it sleeps, unless OMP_WAIT_POLICY or GOMP_SPINCOUNT says otherwise.
    On a busy machine the thread that the others wait for has no core, so they spin away the time that it needs. Each
    side is a run of the job group with one node of each task; a busy loop for each core stands for other programs. The
    first step warms up and is left out. With --quick the tiny model is measured alone.
    """
    sides = []
    with tempfile.TemporaryDirectory() as directory:
        tiny = models.directory("tiny", Path(directory) / "tiny")
        tasks = {"tiny": TINY | {"MODEL_NAME": str(tiny)}}
        if not given.quick:
            tasks[given.model] = {"MODEL_NAME": given.model}
        for task, settings in tasks.items():
            for state, loops in {"idle": 0, "busy": cores()}.items():
                work = settings | {"MAX_STEPS": str(given.steps)}
                choices = [
                    Side(f"{task}, {state}, {name}", partial(run_steps, work | choice, loops))
                    for name, choice in CHOICES.items()
                ]
                sides += harness.in_turn(choices, given.rounds)
    return sides


def thread_tables(_given: Given, sides: Sequence[Side]) -> list[Table]:
    """Return the seconds of each phase."""
    columns: harness.Columns = {
        "model, machine, threads": harness.name_of,
        "train": lambda side: side.spread("train", 3),
        "generate": lambda side: side.spread("generate", 3),
    }
    return [harness.table(f"seconds of a step's phases, {cores()} cores", sides, columns)]


THREADS = Benchmark(
    measure=measure_threads,
    tables=thread_tables,
    rounds=2,
    options={"model": MODEL, "steps": Option(6, "steps of a run, the first of which warms up")},
)
