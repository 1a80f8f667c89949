"""Run `make demo-environment` with several seeds.

    python -m benchmarks.environment [--rounds 3] [--quick] [--json FILE]

Each round has a seed of its own. "Reward" is the mean return of the episodes of the first and of the last training
step, at temperature 1. "Won" is the share of held-out episodes that the model wins by greedy answers in the run's own
first and last evaluation; good guesses win all of them. "Turns" are the model's turns an episode in the first and in
the last training step. The seconds are those of the whole run, from start to end.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from rich.table import Table

from benchmarks.common import harness
from benchmarks.common.harness import ROOT
from benchmarks.common.job import Job, running
from local_runner import spec

JOB_GROUP = ROOT / "jobgroups/environment.yaml"
SETTINGS = spec.env_file(ROOT / "examples/demo-environment.env")
"""The settings of `make demo-environment`."""
QUICK_STEPS = 2


@dataclass(frozen=True)
class Result:
    """The run of a seed; pairs are of the first and of the last step or evaluation."""

    seed: int
    reward: tuple[float, float]
    won: tuple[float, float]
    turns: tuple[float, float]
    steps: int
    seconds: float


def run(seed: int, more: dict[str, str]) -> Result:
    """Train with a seed.

    Raises:
        SystemExit: the run failed; its messages are on stderr.
    """
    with tempfile.TemporaryDirectory() as name:
        started = time.monotonic()
        with running(Path(name), JOB_GROUP, SETTINGS | {"SEED": str(seed)} | more, {}) as job:
            job.wait(lambda: False)
        return result_of(job, seed, time.monotonic() - started)


def result_of(job: Job, seed: int, seconds: float) -> Result:
    """Return the result of a run that has succeeded."""
    steps, summary = job.steps(), orjson.loads((job.run_dir / "summary.json").read_bytes())
    first, last = steps[0], steps[-1]
    return Result(
        seed=seed,
        reward=(first["reward_mean"], last["reward_mean"]),
        won=(summary["accuracy_before"], summary["accuracy_after"]),
        turns=(first["turns_mean"], last["turns_mean"]),
        steps=len(steps),
        seconds=seconds,
    )


def show(results: Sequence[Result]) -> Table:
    """Return the table of all seeds."""
    rows = [
        [
            result.seed,
            *(f"{before:.2f} to {after:.2f}" for before, after in (result.reward, result.turns, result.won)),
            result.steps,
            f"{result.seconds:.0f}",
        ]
        for result in results
    ]
    title = f"make demo-environment: first to last step; {SETTINGS['EVAL_PROMPTS']} held-out episodes"
    return harness.table(title, ["seed", "reward", "turns an episode", "won", "steps", "seconds"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    given = harness.CommandLine("environment", rounds=3, quick=f"one seed, {QUICK_STEPS} steps").parse(arguments)
    more = {"MAX_STEPS": str(QUICK_STEPS)} if given.quick else {}
    results = []
    for seed in range(given.rounds):
        results.append(run(seed, more))
        harness.say(f"{results[-1]}")
    harness.finish(given, [show(results)], results)


if __name__ == "__main__":
    main()
