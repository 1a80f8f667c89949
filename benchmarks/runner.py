"""Run the benchmarks one after the other and write docs/benchmarks.md: ``python -m benchmarks [--quick]``.

Every benchmark is a program of its own (``python -m benchmarks.NAME``) that measures both sides in turn and prints a
table. The runner keeps each output with command, machine and date as docs/benchmarks/NAME.json, or as
NAME-bfloat16.json where the processor has bfloat16 instructions, and writes the page from these files and the remarks
in NAME.md. ``--only`` runs some of them; ``--page-only`` runs none. Other options are passed to the benchmark if
``--only`` names a single one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

from benchmarks.common import harness
from benchmarks.common.harness import ROOT
from services.core.machine import cores

PAGE = ROOT / "docs/benchmarks.md"
KEPT = ROOT / "docs/benchmarks"
RECORD = KEPT / "record.md"
WIDTH = 120
BUSY_SECONDS = 3.0


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and its command."""

    name: str
    title: str
    module: str
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Defaults of environment variables that it needs."""
    needs: str = ""
    """An environment variable without which it is left out."""
    needs_gpu: bool = False


TRL = ("--trl-python", ".venv-trl/bin/python")
SGLANG_ON_CPU = {
    "ROLLOUT_ENGINE": "sglang",
    "SGLANG_EXTRA_FLAGS": "--device cpu --attention-backend torch_native --disable-overlap-schedule "
    "--max-total-tokens 16384 --max-running-requests 64 --tp-size 1 --log-level warning",
}
SGLANG_OPTIONS = ("--dtype", "float32", "--skip-baselines")
SGLANG_TITLE = "Rollouts by the real SGLang on the same CPU"

BENCHMARKS = (
    Benchmark("step", "One GRPO step against TRL", "step", TRL),
    Benchmark("reward", "Time to a mean reward of 0.9, against TRL", "reward", TRL),
    Benchmark("agent", "Learning to use a tool", "agent"),
    Benchmark("environment", "Learning a game of an environment-server", "environment"),
    Benchmark("rollouts", "Rollouts", "rollouts"),
    Benchmark(
        "rollouts-sglang",
        SGLANG_TITLE,
        "rollouts",
        ("--dtype", "float32", "--skip-baselines"),
        SGLANG_ON_CPU,
        "SGLANG_PYTHON",
    ),
    Benchmark("conversations", "Episodes of several turns", "conversations"),
    Benchmark("trainer", "The update alone, against a bare forward and backward pass", "trainer"),
    Benchmark("trees", "Agents' episodes as trees of tokens, against their sequences one by one", "trees"),
    Benchmark("publishing", "Publishing weights", "publishing"),
    Benchmark("async", "Asynchronous against synchronous", "asynchronous"),
    Benchmark("collectors", "Two collectors and two dozen", "collectors"),
    Benchmark("services", "Data, reward and replay services", "services", ("--no-fail",)),
    Benchmark("gateway", "The gateway with an engine that costs nothing", "gateway", ("--no-fail",)),
    Benchmark("start", "Imports at the start", "start"),
    Benchmark("recovery", "What a death costs", "recovery"),
    Benchmark("environment-server", "One environment-server with 256 episodes at once", "environment_server"),
    Benchmark("trajectories", "A million steps as trajectories, against gymnasium alone", "trajectories"),
    Benchmark("evaluate-bodies", "States as JSON and as bytes at the evaluation head", "evaluate_bodies"),
    Benchmark("policy", "The evaluation head against a model in every worker", "policy"),
    Benchmark("gpu", "Updates, publications and GSM8K on GPUs", "gpu", needs="SGLANG_PYTHON", needs_gpu=True),
)


@dataclass(frozen=True)
class Measured:
    """The output of a benchmark, and the machine it ran on."""

    command: str
    date: str
    machine: str
    output: str


def machine() -> str:
    """Return a line about the machine, and how busy it is before a benchmark begins."""
    busy = psutil.cpu_percent(interval=BUSY_SECONDS)
    memory = psutil.virtual_memory().total / 2**30
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    instructions = torch.backends.cpu.get_cpu_capability() + (" with bfloat16" if harness.has_bfloat16() else "")
    kind = f"{platform.system()} {platform.machine()}, {cores()} cores ({instructions})"
    return f"{kind}, {memory:.0f} GiB{gpu}, {busy:.0f}% busy before"


def measure(benchmark: Benchmark, more: Sequence[str]) -> Measured:
    """Run a benchmark with ``more`` options.

    Raises:
        SystemExit: it failed; its messages are on stderr.
    """
    command = ["-m", f"benchmarks.{benchmark.module}", *benchmark.options, *more]
    harness.say(f"python {' '.join(command)}")
    here = machine()
    environment = {**benchmark.environment, **os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    with harness.programs([[sys.executable, *command]], [environment], None) as [process]:
        output = harness.output_of(process, benchmark.module)
    lines = "\n".join(line.rstrip() for line in output.splitlines())
    return Measured("python " + " ".join(command), datetime.now(tz=UTC).date().isoformat(), here, lines.strip("\n"))


def kept_files(name: str) -> tuple[Path, Path]:
    """Return where a benchmark's output is kept: from processors without bfloat16 instructions, and with them."""
    return KEPT / f"{name}.json", KEPT / f"{name}-bfloat16.json"


def page() -> str:
    """Return the text of docs/benchmarks.md."""
    parts = [
        "# Benchmarks",
        "`make bench` runs everything on this page on your machine and writes it anew; `make bench-quick` does it in\n"
        "few rounds. Each section is what its command printed, on a processor without bfloat16 instructions and on\n"
        "one with them where both were at hand. Ours and theirs were measured in turn. Learning curves are in\n"
        "[results.md](results.md).",
    ]
    for benchmark in BENCHMARKS:
        kept = [path for path in kept_files(benchmark.name) if path.exists()]
        parts.append(f"## {benchmark.title}")
        if not kept:
            how = f"`python -m benchmarks --only {benchmark.name}` does"
            with_what = f", with {benchmark.needs} set" if benchmark.needs else ""
            with_what += " on a node with GPUs" if benchmark.needs_gpu else ""
            parts.append(f"Not measured here; {how}{with_what}.")
            continue
        for path in kept:
            measured = Measured(**json.loads(path.read_text()))
            parts.append(f"`{measured.command}`, {measured.date}, {measured.machine}:")
            parts.append(f"```text\n{measured.output}\n```")
        remark = KEPT / f"{benchmark.name}.md"
        if remark.exists():
            parts.append(remark.read_text().strip())
    parts.append(RECORD.read_text().strip())
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, and write the page."""
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--only", nargs="+", choices=names, help="what to measure")
    parser.add_argument("--page-only", action="store_true", help="measure nothing, write the page of what is kept")
    given, more = parser.parse_known_args(arguments)
    harness.end_in_order()
    if more and len(given.only or ()) != 1:
        parser.error(f"{' '.join(more)}: options of a benchmark need --only with its name alone")
    for name in [] if given.page_only else given.only or names:
        benchmark = BENCHMARKS[names.index(name)]
        if benchmark.needs and not os.environ.get(benchmark.needs):
            harness.say(f"{name} is left out: {benchmark.needs} is not set; see docs/rollouts.md")
            continue
        if benchmark.needs_gpu and not torch.cuda.is_available():
            harness.say(f"{name} is left out: torch sees no GPU")
            continue
        measured = measure(benchmark, ["--quick", *more] if given.quick else more)
        kept = kept_files(name)[harness.has_bfloat16()]
        kept.write_text(json.dumps(asdict(measured), indent=2) + "\n")
        print(measured.output)
    PAGE.write_text(page())
