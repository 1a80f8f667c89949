"""Run `make demo-agent` with several seeds, and evaluate what each one learnt, with the agent's tool and without.

    python -m benchmarks.agent [--rounds 3] [--quick] [--json FILE]

Each round has a seed of its own. "With the tool" is the greedy accuracy on held-out questions of the run's own first
and last evaluation, in which the agent plays. "Calls" are the parsed tool calls an episode in the first and in the last
training step, at temperature 1; one is needed. "Without" is the trained model's greedy accuracy on held-out questions
that it gets without agent and tool. The seconds are those of the whole run, from start to end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from benchmarks.common import harness
from benchmarks.common.harness import ROOT
from benchmarks.common.job import Job, running
from evaluation.metrics import GREEDY
from local_runner import spec

JOB_GROUP = ROOT / "jobgroups/agent.yaml"
SETTINGS = spec.env_file(ROOT / "examples/demo-agent.env")
"""The settings of `make demo-agent`."""
WITHOUT_TOKENS = 64
"""Longest answer without the tool: room to reason before it."""
QUICK_STEPS = 2


@dataclass(frozen=True)
class Result:
    """The run of a seed; pairs are of the first and of the last step or evaluation."""

    seed: int
    reward: tuple[float, float]
    accuracy: tuple[float, float]
    calls: tuple[float, float]
    accuracy_without: float
    steps: int
    seconds: float


def run(seed: int, more: dict[str, str]) -> Result:
    """Train with a seed, and evaluate.

    Raises:
        SystemExit: the run or the evaluation failed; its messages are on stderr.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        started = time.monotonic()
        with running(directory, JOB_GROUP, SETTINGS | {"SEED": str(seed)} | more, {}) as job:
            job.wait(lambda: False)
        return result_of(job, seed, time.monotonic() - started, without_tool(job.run_dir / "model", directory))


def result_of(job: Job, seed: int, seconds: float, accuracy_without: float) -> Result:
    """Return the result of a run that has succeeded."""
    steps, summary = job.steps(), orjson.loads((job.run_dir / "summary.json").read_bytes())
    first, last = steps[0], steps[-1]
    return Result(
        seed=seed,
        reward=(first["reward_mean"], last["reward_mean"]),
        accuracy=(summary["accuracy_before"], summary["accuracy_after"]),
        calls=(parsed_calls(first), parsed_calls(last)),
        accuracy_without=accuracy_without,
        steps=len(steps),
        seconds=seconds,
    )


def parsed_calls(step: Mapping[str, Any]) -> float:
    """Return the parsed tool calls an episode of a step."""
    calls: float = step["tool_calls_mean"] * step.get("tool_calls_parsed", 0.0)
    return calls


def without_tool(model: Path, directory: Path) -> float:
    """Return a model's greedy accuracy on the run's held-out questions, each answered by one completion."""
    output = directory / "without"
    command = [sys.executable, "-m", "scripts.grpo", "evaluate", "--model", str(model), "--output", str(output)]
    command += ["--workflow", "single-turn", "--limit", SETTINGS["EVAL_PROMPTS"]]
    command += ["--env-file", "examples/demo-agent.env", "--max-new-tokens", str(WITHOUT_TOKENS)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout[-3000:]}\nerror: the evaluation ended with {done.returncode}")
    [results] = output.rglob("results.json")
    accuracy: float = orjson.loads(results.read_bytes())["metrics"][GREEDY]["value"]
    return accuracy


def show(results: Sequence[Result]) -> Table:
    """Return the table of all seeds."""
    columns = ["seed", "reward", "calls an episode", "accuracy with the tool", "without", "steps", "seconds"]
    rows = [
        [
            result.seed,
            *(f"{before:.2f} to {after:.2f}" for before, after in (result.reward, result.calls, result.accuracy)),
            f"{result.accuracy_without:.2f}",
            result.steps,
            f"{result.seconds:.0f}",
        ]
        for result in results
    ]
    title = f"make demo-agent: first to last step; accuracy on {SETTINGS['EVAL_PROMPTS']} held-out questions"
    return harness.table(title, columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    given = harness.CommandLine("agent", rounds=3, quick=f"one seed, {QUICK_STEPS} steps").parse(arguments)
    more = {"MAX_STEPS": str(QUICK_STEPS)} if given.quick else {}
    results = []
    for seed in range(given.rounds):
        results.append(run(seed, more))
        harness.say(f"{results[-1]}")
    harness.finish(given, [show(results)], results)


if __name__ == "__main__":
    main()
