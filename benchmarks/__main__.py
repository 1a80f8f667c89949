"""Run the benchmarks: one by its name, or one after the other with docs/benchmarks.md as the result.

    python -m benchmarks NAME [--rounds N] [--quick] [--json FILE] [...]
    python -m benchmarks [--quick] [--only NAME ...] [--page-only]

With a name in front, a benchmark measures its sides in turn and prints a table; ``--help`` after the name says what it
measures. Otherwise every benchmark of the page runs as a program of its own. Its output is kept with command,
machine and date as docs/benchmarks/NAME.json, or as NAME-bfloat16.json where the processor has bfloat16 instructions,
and the page is made of these files and the remarks in NAME.md. ``--only`` runs some of them; ``--page-only`` runs none.
Other options are passed to the benchmark if ``--only`` names a single one.
"""

from __future__ import annotations

import argparse
import importlib
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

from benchmarks import harness
from benchmarks.harness import ROOT, Benchmark
from services.core.machine import cores

PAGE = ROOT / "docs/benchmarks.md"
KEPT = ROOT / "docs/benchmarks"
WIDTH = 120
BUSY_SECONDS = 3.0

BENCHMARKS = {
    "step": "against_trl:STEP",
    "reward": "against_trl:REWARD",
    "rollouts": "rollouts:SPEED",
    "trainer": "training:UPDATES",
    "publishing": "publishing:PUBLISHING",
    "async": "asynchronous:ASYNC",
    "services": "services:SERVICES_UNDER_LOAD",
    "gateway": "gateway:GATEWAY",
    "cluster": "cluster:CLUSTER",
    "sandbox": "sandbox:SANDBOX",
    "gpu": "gpu:GPU",
}
"""Each benchmark's module and name in it, by its name on the command line."""


@dataclass(frozen=True)
class Section:
    """A section of the page: a benchmark and its command."""

    name: str
    title: str
    options: tuple[str, ...] = ()
    benchmark: str = ""
    """By default the one with the section's name."""
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

SECTIONS = (
    Section("step", "One GRPO step against TRL", TRL),
    Section("reward", "Time to a mean reward of 0.9, against TRL", TRL),
    Section("rollouts", "Rollouts"),
    Section(
        "rollouts-sglang",
        "Rollouts by the real SGLang on the same CPU",
        ("--dtype", "float32", "--skip-baselines"),
        "rollouts",
        SGLANG_ON_CPU,
        "SGLANG_PYTHON",
    ),
    Section("trainer", "The update alone, against a bare forward and backward pass"),
    Section("publishing", "Publishing weights"),
    Section("async", "Asynchronous against synchronous"),
    Section(
        "services",
        "Data, reward and replay services",
        ("--only", "reward-server,data-server,replay-buffer", "--no-fail"),
    ),
    Section("gateway", "The gateway with an engine that costs nothing", ("--no-fail",)),
    Section("cluster", "The services of 64 rollout nodes, with simulated engines", ("--no-fail",)),
    Section("sandbox", "Programs in boxes"),
    Section(
        "environment-server",
        "Environment-server and evaluation head",
        ("--only", "environment-server,evaluation-head"),
        "services",
    ),
    Section("gpu", "Updates, publications and GSM8K on GPUs", needs="SGLANG_PYTHON", needs_gpu=True),
)
"""The sections in the order of the page."""


def load(name: str) -> Benchmark:
    """Return a benchmark by its name; its module alone is imported."""
    module, _, variable = BENCHMARKS[name].partition(":")
    benchmark: Benchmark = getattr(importlib.import_module(f"benchmarks.{module}"), variable)
    return benchmark


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


def measure(section: Section, more: Sequence[str]) -> Measured:
    """Run a section's benchmark with ``more`` options.

    Raises:
        SystemExit: it failed; its messages are on stderr.
    """
    name = section.benchmark or section.name
    command = ["-m", "benchmarks", name, *section.options, *more]
    harness.say(f"python {' '.join(command)}")
    here = machine()
    environment = {**section.environment, **os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    with harness.programs([[sys.executable, *command]], [environment], None) as [process]:
        output = harness.output_of(process, name)
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
    for section in SECTIONS:
        kept = [path for path in kept_files(section.name) if path.exists()]
        parts.append(f"## {section.title}")
        if not kept:
            how = f"`python -m benchmarks --only {section.name}` does"
            with_what = f", with {section.needs} set" if section.needs else ""
            with_what += " on a node with GPUs" if section.needs_gpu else ""
            parts.append(f"Not measured here; {how}{with_what}.")
            continue
        for path in kept:
            measured = Measured(**json.loads(path.read_text("utf-8")))
            parts.append(f"`{measured.command}`, {measured.date}, {measured.machine}:")
            parts.append(f"```text\n{measured.output}\n```")
        remark = KEPT / f"{section.name}.md"
        if remark.exists():
            parts.append(remark.read_text("utf-8").strip())
    parts.append(
        "## What was tried\n\n"
        "[The laboratory notebook](benchmarks/record.md) has the measurements behind\n"
        "decisions: number types, libraries that were tried and not taken, how threads wait, and where a demo's\n"
        "processor seconds go."
    )
    return "\n\n".join(parts) + "\n"


def measure_page(arguments: Sequence[str] | None) -> None:
    """Read the command line, measure the sections of the page, and write it."""
    names = [section.name for section in SECTIONS]
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__, formatter_class=form)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--only", nargs="+", choices=names, help="what to measure")
    parser.add_argument("--page-only", action="store_true", help="measure nothing, write the page of what is kept")
    args, more = parser.parse_known_args(arguments)
    harness.end_in_order()
    if more and len(args.only or ()) != 1:
        parser.error(f"{' '.join(more)}: options of a benchmark need --only with its name alone")
    for name in [] if args.page_only else args.only or names:
        section = SECTIONS[names.index(name)]
        if section.needs and not os.environ.get(section.needs):
            harness.say(f"{name} is left out: {section.needs} is not set; see docs/rollouts.md")
            continue
        if section.needs_gpu and not torch.cuda.is_available():
            harness.say(f"{name} is left out: torch sees no GPU")
            continue
        measured = measure(section, ["--quick", *more] if args.quick else more)
        kept = kept_files(name)[harness.has_bfloat16()]
        kept.write_text(json.dumps(asdict(measured), indent=2) + "\n")
        print(measured.output)
    PAGE.write_text(page(), "utf-8")


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark if the first argument is a name, else those of the page."""
    if arguments and not arguments[0].startswith("-"):
        name, *options = arguments
        if name not in BENCHMARKS:
            raise SystemExit(f"error: there is no benchmark {name}; there are {', '.join(BENCHMARKS)}")
        return load(name).run(name, options)
    measure_page(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
