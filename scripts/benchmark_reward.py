"""Measures how long the demo takes to a mean reward of 0.9, ours and TRL's GRPOTrainer, in one run.

    python -m scripts.benchmark_reward --trl-python .venv-trl/bin/python [--quick] [--json FILE]

Ours is the demo as `make demo` runs it (jobgroup.yaml with demo.env), without its evaluations; TRL trains the same
model on the same questions with as many prompts, completions and tokens, at the same learning rate, in float32 on all
cores. The reward counts as reached when the mean over three steps is; the seconds are those of the steps until then,
without starting up. Neither goes on for longer than ``--minutes``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.benchmarks import trl_side
from scripts.benchmarks.ending import end_in_order
from scripts.benchmarks.job import ROOT, run_job
from scripts.benchmarks.trl_side import Steps, Work
from scripts.local import spec
from scripts.local.environment import cores

AVERAGED_STEPS = 3
RATIO_TARGET = 0.25
"""Of TRL's seconds."""
MOST_STEPS = 60


@dataclass
class Side:
    """The run of one of the two."""

    name: str
    steps: Steps
    target: float

    @property
    def reached(self) -> int | None:
        """Steps until the mean reward was that; None if it never was."""
        return reached(self.steps.rewards, self.target)

    @property
    def seconds(self) -> float:
        """Of the steps until then, or of all."""
        return sum(self.steps.seconds[: self.reached])


def reached(rewards: Sequence[float], target: float) -> int | None:
    """After how many steps the mean over the last three was at least ``target``; None if never."""
    for count in range(AVERAGED_STEPS, len(rewards) + 1):
        if sum(rewards[count - AVERAGED_STEPS : count]) / AVERAGED_STEPS >= target:
            return count
    return None


def work_of_the_demo() -> Work:
    """What demo.env says, for TRL."""
    settings = spec.env_file(ROOT / "demo.env")
    return Work(
        model=settings["MODEL_NAME"],
        prompts=int(settings["BATCH_SIZE"]),
        group_size=int(settings["GROUP_SIZE"]),
        completion_tokens=int(settings["MAX_NEW_TOKENS"]),
        learning_rate=float(settings["LEARNING_RATE"]),
        steps=MOST_STEPS,
    )


def ours(target: float, limit_seconds: float) -> Steps:
    """The steps of the demo."""
    settings = {**spec.env_file(ROOT / "demo.env"), "MAX_STEPS": MOST_STEPS, "EVAL_PROMPTS": 0, "NUM_EPOCHS": 100}

    def is_enough(steps: Sequence[dict[str, float]]) -> bool:
        rewards = [step["reward_mean"] for step in steps]
        return reached(rewards, target) is not None or sum(s["seconds_step"] for s in steps) > limit_seconds

    steps = run_job("jobgroup.yaml", settings, {}, is_enough)
    return Steps([step["seconds_step"] for step in steps], [step["reward_mean"] for step in steps])


def show(sides: Sequence[Side]) -> Table:
    """Steps and seconds, and the ratio to the last side, TRL."""
    table = Table(
        title=f"to a mean reward of {sides[0].target:g}, float32, {cores()} cores; to reach: {RATIO_TARGET:g} of TRL's"
    )
    for name in ("", "reached", "steps", "seconds", "of TRL's", "mean reward of the last three"):
        table.add_column(name, justify="right" if name else "left")
    base = sides[-1]
    for side in sides:
        count = side.reached
        last = side.steps.rewards[:count][-AVERAGED_STEPS:]
        # A side that has not reached it takes longer than it was given.
        ratio = (
            "" if count is None else f"{'less than ' if base.reached is None else ''}{side.seconds / base.seconds:.2f}"
        )
        table.add_row(
            side.name,
            "yes" if count else f"not within {side.seconds / 60:.0f} min",
            str(count or len(side.steps.seconds)),
            f"{side.seconds:.0f}",
            ratio,
            f"{sum(last) / len(last):.2f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmark_reward")
    parser.add_argument("--trl-python", required=True, help="an interpreter with TRL; `make bench` installs one")
    parser.add_argument("--reward", type=float, default=0.9, help="the mean reward to reach")
    parser.add_argument("--minutes", type=float, default=12.0, help="the longest that one may train")
    parser.add_argument("--quick", action="store_true", help="to a reward of 0.3, one minute at most")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    given = parser.parse_args(arguments)
    end_in_order()
    target, limit = (0.3, 60.0) if given.quick else (given.reward, 60 * given.minutes)
    work = replace(work_of_the_demo(), target=target, limit_seconds=limit)
    sides = [Side("ours", ours(target, limit), target)]
    print(f"ours: {sides[0].seconds:.0f} s", file=sys.stderr, flush=True)
    sides.append(Side("TRL", trl_side.train(work, given.trl_python, cores()), target))
    Console().print(show(sides))
    if given.json:
        result = {"work": asdict(work), "threads": cores(), "sides": [asdict(side) for side in sides]}
        given.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
