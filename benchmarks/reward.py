"""Measures how long the demo's task takes to a mean reward of 0.9, ours and TRL's GRPOTrainer, alternating, in one run.

    python -m benchmarks.reward --trl-python .venv-trl/bin/python [--quick] [--json FILE]

Ours is jobgroup.yaml with demo.env, without its evaluations, on one trainer node and one rollout node with all cores
each, since they compute in turn; TRL trains the same model on the same questions with as many prompts, completions and
tokens, at the same learning rate, in float32 on all cores. The reward counts as reached when the mean over three steps
is; the seconds are those of the steps until then, without starting up. Neither goes on for longer than ``--minutes``.
Every round has a seed of its own, since luck decides over some steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common import trl_side
from benchmarks.common.ending import end_in_order
from benchmarks.common.figures import spread
from benchmarks.common.job import DEMO, run_job
from benchmarks.common.trl_side import Steps, Work
from local_runner.environment import cores

AVERAGED_STEPS = 3
RATIO_TARGET = 0.25
"""Of TRL's seconds."""
MOST_STEPS = 60


@dataclass
class Side:
    """The runs of one of the two."""

    name: str
    target: float
    runs: list[Steps] = field(default_factory=list)

    @property
    def counts(self) -> list[int | None]:
        """By run: steps until the mean reward was reached; None if it never was."""
        return [reached(run.rewards, self.target) for run in self.runs]

    @property
    def steps(self) -> list[int]:
        """By run: steps until then, or all."""
        return [len(run.seconds) if count is None else count for run, count in zip(self.runs, self.counts, strict=True)]

    @property
    def seconds(self) -> list[float]:
        """By run: seconds of these steps."""
        return [sum(run.seconds[:steps]) for run, steps in zip(self.runs, self.steps, strict=True)]

    @property
    def last_reward(self) -> float:
        """Mean reward of the last three of these steps, over all runs."""
        pairs = zip(self.runs, self.steps, strict=True)
        return statistics.fmean(reward for run, steps in pairs for reward in run.rewards[:steps][-AVERAGED_STEPS:])


def reached(rewards: Sequence[float], target: float) -> int | None:
    """After how many steps the mean over the last three was at least ``target``; None if never."""
    for count in range(AVERAGED_STEPS, len(rewards) + 1):
        if sum(rewards[count - AVERAGED_STEPS : count]) / AVERAGED_STEPS >= target:
            return count
    return None


def work_of_the_demo() -> Work:
    """What demo.env says, for TRL."""
    return Work(
        model=DEMO["MODEL_NAME"],
        prompts=int(DEMO["BATCH_SIZE"]),
        group_size=int(DEMO["GROUP_SIZE"]),
        completion_tokens=int(DEMO["MAX_NEW_TOKENS"]),
        learning_rate=float(DEMO["LEARNING_RATE"]),
        steps=MOST_STEPS,
    )


def ours(work: Work) -> Steps:
    """The steps of the demo."""
    assert work.target is not None
    assert work.limit_seconds is not None
    target, limit = work.target, work.limit_seconds
    settings = {
        **DEMO,
        "MAX_STEPS": MOST_STEPS,
        "EVAL_PROMPTS": 0,
        "NUM_EPOCHS": 100,
        "MIN_WORKERS": 1,
        "KEEP_MEMORY": "true",
        # As TRL computes, whatever the processor.
        "COMPUTE_TYPE": "float32",
        "SEED": work.seed,
    }

    def is_enough(steps: Sequence[dict[str, float]]) -> bool:
        rewards = [step["reward_mean"] for step in steps]
        return reached(rewards, target) is not None or sum(s["seconds_step"] for s in steps) > limit

    steps = run_job("jobgroup.yaml", settings, {"rollout-server": 1, "ppo-trainer": 1}, is_enough)
    return Steps([step["seconds_step"] for step in steps], [step["reward_mean"] for step in steps])


def show(sides: Sequence[Side]) -> Table:
    """Steps and seconds, and the ratio to the last side, TRL."""
    table = Table(
        title=f"to a mean reward of {sides[0].target:g}, float32, {cores()} cores; to reach: {RATIO_TARGET:g} of TRL's"
    )
    for name in ("", "reached", "steps", "seconds", "of TRL's", "mean reward of the last three"):
        table.add_column(name, justify="right" if name else "left")
    for side in sides:
        is_reached = [count is not None for count in side.counts]
        table.add_row(
            side.name,
            f"{sum(is_reached)} of {len(is_reached)}",
            spread(side.steps, 0),
            spread(side.seconds, 0),
            _ratio(side, sides[-1]) if all(is_reached) else "",
            f"{side.last_reward:.2f}",
        )
    return table


def _ratio(side: Side, base: Side) -> str:
    # A run that has not reached it takes longer than it was given.
    bound = "less than " if None in base.counts else ""
    return f"{bound}{statistics.median(side.seconds) / statistics.median(base.seconds):.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward")
    parser.add_argument("--trl-python", required=True, help="an interpreter with TRL; `make bench` installs one")
    parser.add_argument("--reward", type=float, default=0.9, help="the mean reward to reach")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, every one with another seed")
    parser.add_argument("--minutes", type=float, default=12.0, help="the longest that one may train")
    parser.add_argument("--quick", action="store_true", help="one round, to a reward of 0.3, one minute at most")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    given = parser.parse_args(arguments)
    end_in_order()
    if given.quick:
        given.reward, given.minutes, given.rounds = 0.3, 1.0, 1
    work = replace(work_of_the_demo(), target=given.reward, limit_seconds=60 * given.minutes)
    sides = [Side("ours", given.reward), Side("TRL", given.reward)]
    for seed in range(given.rounds):
        seeded = replace(work, seed=seed)
        for side in sides:
            side.runs.append(ours(seeded) if side is sides[0] else trl_side.train(seeded, given.trl_python, cores()))
            print(f"seed {seed}, {side.name}: {side.seconds[-1]:.0f} s", file=sys.stderr, flush=True)
    Console().print(show(sides))
    if given.json:
        result = {"work": asdict(work), "threads": cores(), "sides": [asdict(side) for side in sides]}
        given.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
