"""Write README's figures of ``make demo``: ``python -m scripts.reference.demo [runs/ID] [--check]``.

With a run's directory, docs/demo.json gets the run's figures first. README and docs/demo.svg are written from it.
"""

from __future__ import annotations

import platform
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import orjson

from local_runner.view import describe
from scripts.reference import ROOT, write_or_check
from services.core.files import read_object
from services.core.machine import cores
from services.run_page.directory import Run
from services.run_page.progress import Step, first_and_last, mean_rewards

README = ROOT / "README.md"
RECORD = ROOT / "docs" / "demo.json"
PLOT = ROOT / "docs" / "demo.svg"
SHOWN_STEPS = 4
WIDTH = 132
BLOCK = re.compile(r"(<!-- (\w+), written by scripts\.reference\.demo -->\n).*?(<!-- end -->)", re.DOTALL)


def read_run(run: Path) -> dict[str, Any]:
    """Return the figures of a finished run from its summary.json, runner.json, config.json and metrics.jsonl.

    Raises:
        SystemExit: the run has not finished.
    """
    summary, outcome = read_object(run / "summary.json"), read_object(run / "runner.json")
    if not summary or not outcome:
        raise SystemExit(f"error: {run} has no summary.json and runner.json; give the directory of a finished demo run")
    steps = Run(run).steps()
    settings = read_object(run / "config.json")["components"]["ppo-trainer"]["settings"]
    return {
        "machine": f"{platform.system()} {platform.machine()}, {cores()} cores",
        "seconds": outcome["seconds"],
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "held_out": settings["eval_prompts"],
        "metrics": [vars(step) for step in steps],
    }


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return the text of each of README's blocks."""
    steps = [Step(**step) for step in record["metrics"]]
    rewards = first_and_last(mean_rewards(steps))
    averaged = rewards["reward_steps"]
    outcome = (
        "`make demo` trains a pretrained model of 135M parameters to answer additions with just the number. "
        f"In {len(steps)} steps the mean reward rose from {rewards['reward_first']:.2f} to "
        f"{rewards['reward_last']:.2f} (first and last {averaged} steps), and accuracy on "
        f"{record['held_out']} held-out questions from {record['accuracy_before']:.2f} to "
        f"{record['accuracy_after']:.2f}. It took {record['seconds'] / 60:.1f} minutes ({record['machine']}), "
        "after the downloads; [other tasks and seeds](docs/results.md#tasks-of-one-completion)."
    )
    lines = [describe(step, len(steps), None) for step in steps[:SHOWN_STEPS]]
    return {
        "outcome": f"{textwrap.fill(outcome, WIDTH)}\n",
        "steps": "".join(f"    {line}\n" for line in [*lines, "..."]),
    }


def page(record: dict[str, Any], readme: str) -> str:
    """Return README with the text of its blocks replaced."""
    texts = blocks(record)
    return BLOCK.sub(lambda block: f"{block[1]}{texts[block[2]]}{block[3]}", readme)


def draw(record: dict[str, Any]) -> None:
    """Draw the mean reward by step, and the accuracy before and after, into docs/demo.svg."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {"svg.hashsalt": "demo", "svg.fonttype": "none"}
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    numbers = [step["step"] for step in record["metrics"]]
    axes.plot(numbers, [step["reward"] for step in record["metrics"]], marker="o", label="mean reward of the step")
    accuracies = (record["accuracy_before"], record["accuracy_after"])
    axes.plot((0, numbers[-1]), accuracies, "s", label="accuracy on held-out questions")
    axes.set(xlabel="step", ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(PLOT, metadata={"Date": None})


def main(arguments: list[str]) -> int:
    """Write the record of the given run, README's blocks and the plot; return the exit code."""
    for run in (Path(argument) for argument in arguments if not argument.startswith("--")):
        RECORD.write_bytes(orjson.dumps(read_run(run), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    record = orjson.loads(RECORD.read_bytes())
    if "--check" not in arguments:
        draw(record)
    return write_or_check(README, page(record, README.read_text("utf-8")), "scripts.reference.demo", arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
