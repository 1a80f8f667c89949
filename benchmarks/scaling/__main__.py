"""Predict how long a step takes and how many nodes a model needs.

    python -m benchmarks.scaling record runs/RUN measured.json --about "what was run"
    python -m benchmarks.scaling check [--fit FILE ...] [--against FILE ...]
    python -m benchmarks.scaling plan [--models 0.5B,7B,70B] [--step-seconds 120]
    python -m benchmarks.scaling docs

``record`` keeps the metrics of a run that the model needs. ``check`` fits the model of a step to measured runs and
predicts other runs. ``plan`` prints nodes, seconds and the changes to jobgroup.yaml. ``docs`` writes the output of
these two into docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.harness import ROOT
from benchmarks.scaling import report
from benchmarks.scaling.plan import MODELS, Batch, cheapest
from benchmarks.scaling.step import Run, fit

MEASURED = Path(__file__).with_name("measured")
FITTED = ("short", "long")
UNSEEN = ("unseen", "more-nodes")
DOCS = ROOT / "docs/scaling.md"
STEP_SECONDS = 120.0

_BLOCK = re.compile(r"(```console\n\$ python -m benchmarks\.scaling ([^\n]*)\n)(.*?)(```)", re.DOTALL)


def measured(names: Sequence[str]) -> list[Run]:
    """Read recorded runs of this repository."""
    return [Run.read(MEASURED / f"{name}.json") for name in names]


def record(given: argparse.Namespace) -> str:
    """Write the steps of a run to a file."""
    lines = [json.loads(line) for line in (given.run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "seconds_step" in line]
    run = Run.of_metrics(given.file.stem, given.about, steps)
    run.write(given.file)
    return f"{given.file}: {len(run.steps)} steps"


def check(given: argparse.Namespace) -> str:
    """Fit rates to runs, and compare predictions of other runs with their measurements."""
    fitted = [Run.read(path) for path in given.fit] if given.fit else measured(FITTED)
    unseen = [Run.read(path) for path in given.against] if given.against else measured(UNSEEN)
    return report.check(fit(fitted), fitted, unseen)


def plan(given: argparse.Namespace) -> str:
    """Search the cheapest layout for each model."""
    batch = Batch(given.prompts, given.group_size, given.prompt_tokens, given.completion_tokens, given.longest)
    rates = fit(measured(FITTED))
    models = [MODELS[label] for label in given.models.split(",")]
    found = [(model, cheapest(model, batch, rates, given.step_seconds)) for model in models]
    return report.plan(found, batch, given.step_seconds, rates)


def docs(given: argparse.Namespace) -> str:
    """Write the output of the commands in docs/scaling.md below them."""
    text = with_output(DOCS.read_text())
    DOCS.write_text(text)
    return f"{DOCS.name} written"


def with_output(text: str) -> str:
    """Return a document in which the output of each of our commands follows it."""
    return _BLOCK.sub(lambda found: f"{found[1]}{run(shlex.split(found[2]))}\n{found[4]}", text)


def run(arguments: Sequence[str] | None = None) -> str:
    """Run a command and return its output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("record", help="keep what is needed of a run's metrics")
    one.add_argument("run", type=Path, help="a run directory")
    one.add_argument("file", type=Path, help="the JSON file to write")
    one.add_argument("--about", required=True, help="what was run, in a line")
    one.set_defaults(command=record)
    one = commands.add_parser("check", help="fit to measured runs, and predict others")
    one.add_argument("--fit", type=Path, nargs="+", help="recorded runs; default this repository's")
    one.add_argument("--against", type=Path, nargs="+", help="recorded runs to predict; default this repository's")
    one.set_defaults(command=check)
    one = commands.add_parser("plan", help="how many nodes a model wants")
    default = Batch()
    one.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    one.add_argument("--step-seconds", type=float, default=STEP_SECONDS, help="longest step; fewest GPUs within it")
    one.add_argument("--prompts", type=int, default=default.prompts, help="BATCH_SIZE")
    one.add_argument("--group-size", type=int, default=default.group_size, help="GROUP_SIZE")
    one.add_argument("--prompt-tokens", type=int, default=default.prompt_tokens)
    one.add_argument("--completion-tokens", type=int, default=default.completion_tokens, help="on average")
    one.add_argument("--longest", type=int, default=default.longest, help="MAX_NEW_TOKENS")
    one.set_defaults(command=plan)
    one = commands.add_parser("docs", help="write docs/scaling.md")
    one.set_defaults(command=docs)
    given = parser.parse_args(arguments)
    try:
        return str(given.command(given))
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    print(run())
