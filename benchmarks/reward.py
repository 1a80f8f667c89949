"""Measure how long the demo's task takes to a mean reward of 0.9, for the job group and for TRL's GRPOTrainer.

    python -m benchmarks.reward --trl-python .venv-trl/bin/python [--quick] [--json FILE]

Ours is jobgroup.yaml with examples/demo.env, without its evaluations, on one trainer node and one rollout node. Each
has all cores, because they compute in turn. TRL trains the same model on the same questions with the same numbers of
prompts, completions and tokens, at the same learning rate, in float32 on all cores. The reward counts as reached when
the mean of three steps reaches it. The seconds are those of the steps until then, without the start. Neither side
trains longer than ``--minutes``. Every round has its own seed, because luck decides over some steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from benchmarks.common import harness
from benchmarks.common.harness import spread
from benchmarks.common.job import DEMO
from benchmarks.common.trl_side import Side, Steps, Work, train_job_group, train_trl
from services.core.machine import cores

AVERAGED_STEPS = 3
RATIO_TARGET = 0.25
"""The aim, as a share of TRL's seconds."""
MOST_STEPS = 60
SETTINGS = DEMO | {"EVAL_PROMPTS": "0", "NUM_EPOCHS": "100", "KEEP_MEMORY": "true"}


def reached(rewards: Sequence[float], target: float) -> int | None:
    """Return after how many steps the mean of the last three was at least ``target``; None if it never was."""
    for count in range(AVERAGED_STEPS, len(rewards) + 1):
        if sum(rewards[count - AVERAGED_STEPS : count]) / AVERAGED_STEPS >= target:
            return count
    return None


def until(run: Steps, target: float) -> Steps:
    """Return the steps of a run until the mean reward was reached, or all."""
    count = reached(run.rewards, target)
    return Steps(run.seconds[:count], run.rewards[:count])


def work_of_the_demo(target: float, limit_seconds: float) -> Work:
    """Return the settings of examples/demo.env as TRL needs them."""
    return Work(
        model=DEMO["MODEL_NAME"],
        prompts=int(DEMO["BATCH_SIZE"]),
        group_size=int(DEMO["GROUP_SIZE"]),
        completion_tokens=int(DEMO["MAX_NEW_TOKENS"]),
        learning_rate=float(DEMO["LEARNING_RATE"]),
        steps=MOST_STEPS,
        target=target,
        limit_seconds=limit_seconds,
    )


def show(sides: Sequence[Side], target: float) -> Table:
    """Return steps, seconds, and the ratio to the last side, TRL, as a table.

    A run that did not reach the reward would need more seconds than it had. So its side has no ratio, and the ratio of
    the other side is a bound.
    """
    rows = []
    are_reached = [[reached(run.rewards, target) is not None for run in side.runs] for side in sides]
    base = statistics.median(sum(until(run, target).seconds) for run in sides[-1].runs)
    for side, is_reached in zip(sides, are_reached, strict=True):
        runs = [until(run, target) for run in side.runs]
        seconds = [sum(run.seconds) for run in runs]
        ratio = f"{statistics.median(seconds) / base:.2f}" if all(is_reached) else ""
        bound = "less than " if ratio and not all(are_reached[-1]) else ""
        last = statistics.fmean(reward for run in runs for reward in run.rewards[-AVERAGED_STEPS:])
        counts = (f"{sum(is_reached)} of {len(runs)}", spread([len(run.seconds) for run in runs], 0))
        rows.append((side.name, *counts, spread(seconds, 0), bound + ratio, f"{last:.2f}"))
    return harness.table(
        f"to a mean reward of {target:g}, float32, {cores()} cores; to reach: {RATIO_TARGET:g} of TRL's",
        ("", "reached", "steps", "seconds", "of TRL's", "mean reward of the last three"),
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("reward", rounds=3, quick="one round, to a reward of 0.3, one minute at most")
    parser.add_argument("--trl-python", required=True, help="an interpreter with TRL; `make bench` installs one")
    parser.add_argument("--reward", type=float, default=0.9, help="the mean reward to reach")
    parser.add_argument("--minutes", type=float, default=12.0, help="the longest that one side may train")
    given = parser.parse(arguments)
    if given.quick:
        given.reward, given.minutes = 0.3, 1.0
    work = work_of_the_demo(given.reward, 60 * given.minutes)

    def is_enough(run: Steps) -> bool:
        return reached(run.rewards, given.reward) is not None or sum(run.seconds) > 60 * given.minutes

    sides = [
        Side("ours", lambda seed: train_job_group(SETTINGS, work, seed, is_enough)),
        Side("TRL", lambda seed: train_trl(work, seed, given.trl_python)),
    ]
    harness.in_turn(sides, given.rounds, Side.add_round)
    harness.finish(given, [show(sides, given.reward)], {"work": work, "runs": {side.name: side.runs for side in sides}})


if __name__ == "__main__":
    main()
