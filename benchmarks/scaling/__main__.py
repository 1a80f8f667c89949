"""Predict how long a step takes and how many nodes a model needs.

    python -m benchmarks.scaling check [--fit METRICS ...] [--against METRICS ...]
    python -m benchmarks.scaling plan [--models 0.5B,8B,70B] [--step-seconds 120]
    python -m benchmarks.scaling launches
    python -m benchmarks.scaling roofline
    python -m benchmarks.scaling one-gpu
    python -m benchmarks.scaling docs

``check`` fits the model of a step to measured runs and predicts other runs. ``plan`` prints nodes, seconds and the
changes to jobgroup.yaml, ``launches`` how busy `grpo launch` keeps the GPUs, ``roofline`` what to expect of a GPU, and
``one-gpu`` the memory of a GPU that engine and trainer share (docs/guides/one-gpu.md). ``docs`` writes the other
outputs into docs/scaling.md and docs/gpus.md.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from benchmarks.harness import ROOT, made_of
from benchmarks.scaling import one_gpu, roofline
from benchmarks.scaling.plan import MODELS, cheapest, check_text, launches_text, plan_text
from benchmarks.scaling.step import Rates, fit, read
from scripts.launch.prediction import Batch

MEASURED = Path(__file__).with_name("measured")
FITTED = (MEASURED / "short.jsonl", MEASURED / "long.jsonl")
UNSEEN = (MEASURED / "unseen.jsonl", MEASURED / "more-nodes.jsonl")
DOCS = ROOT / "docs/scaling.md"
GPU_DOCS = ROOT / "docs/gpus.md"

_BLOCK = re.compile(r"(```console\n\$ python -m benchmarks\.scaling ([^\n]*)\n)(.*?)(```)", re.DOTALL)


def fitted(paths: Sequence[Path] = FITTED) -> Rates:
    """Fit rates to the runs of some metrics.jsonl, by default of this repository's runs."""
    return fit([step for path in paths for step in read(path)])


def check(args: argparse.Namespace) -> str:
    """Fit rates to runs, and compare predictions of other runs with their measurements."""
    return check_text(fitted(args.fit), {path.stem: read(path) for path in args.against})


def plan(args: argparse.Namespace) -> str:
    """Search the cheapest layout for each model."""
    batch = made_of(Batch, args)
    models = [MODELS[label] for label in args.models.split(",")]
    predictions = [(model, cheapest(model, batch, fitted(), args.step_seconds)) for model in models]
    return plan_text(predictions, batch, args.step_seconds)


def docs(args: argparse.Namespace) -> str:
    """Write the output of the commands in docs/scaling.md and docs/gpus.md below them."""
    for path in (DOCS, GPU_DOCS):
        path.write_text(with_output(path.read_text("utf-8")))
    return f"{DOCS.name} and {GPU_DOCS.name} written"


def with_output(text: str) -> str:
    """Return a document in which the output of each of our commands follows it."""
    return _BLOCK.sub(lambda block: f"{block[1]}{run(shlex.split(block[2]))}\n{block[4]}", text)


def run(arguments: Sequence[str] | None = None) -> str:
    """Run a command and return its output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("check", help="fit to measured runs, and predict others")
    one.add_argument("--fit", type=Path, nargs="+", default=FITTED, help="metrics.jsonl of runs to fit the rates to")
    one.add_argument("--against", type=Path, nargs="+", default=UNSEEN, help="metrics.jsonl of runs to predict")
    one.set_defaults(command=check)
    one = commands.add_parser("plan", help="how many nodes a model wants")
    one.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    one.add_argument("--step-seconds", type=float, default=120.0, help="longest step; fewest GPUs within it")
    for field in fields(Batch):
        one.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    one.set_defaults(command=plan)
    others: dict[str, tuple[str, Callable[[argparse.Namespace], str]]] = {
        "launches": ("how busy `grpo launch` keeps the GPUs", lambda _: launches_text(fitted())),
        "roofline": ("what to expect of GPUs", lambda _: roofline.table()),
        "one-gpu": ("the memory of a GPU that engine and trainer share", lambda _: one_gpu.table()),
        "docs": ("write docs/scaling.md and docs/gpus.md", docs),
    }
    for name, (text, command) in others.items():
        commands.add_parser(name, help=text).set_defaults(command=command)
    args = parser.parse_args(arguments)
    try:
        return str(args.command(args))
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    print(run())
