"""Measure how long the demo's task takes to a mean reward of 0.9, for the job group and for TRL's GRPOTrainer.

    python -m benchmarks.reward --trl-python .venv-trl/bin/python [--quick] [--json FILE]

Ours is jobgroup.yaml with demo.env, without its evaluations, on one trainer node and one rollout node. Each has all
cores, because they compute in turn. TRL trains the same model on the same questions with the same numbers of prompts,
completions and tokens, at the same learning rate, in float32 on all cores. The reward counts as reached when the mean
of three steps reaches it. The seconds are those of the steps until then, without the start. Neither side trains longer
than ``--minutes``. Every round has its own seed, because luck decides over some steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rich.table import Table

from benchmarks.common import harness, trl_side
from benchmarks.common.harness import spread
from benchmarks.common.job import DEMO, run_job
from benchmarks.common.job import Steps as JobSteps
from benchmarks.common.trl_side import Steps, Work
from local_runner.environment import cores

AVERAGED_STEPS = 3
RATIO_TARGET = 0.25
"""The aim, as a share of TRL's seconds."""
MOST_STEPS = 60


@dataclass
class Side:
    """One of the two sides and its runs."""

    name: str
    target: float
    runs: list[Steps] = field(default_factory=list)

    @property
    def counts(self) -> list[int | None]:
        """The steps of each run until the mean reward was reached, or None if it never was."""
        return [reached(run.rewards, self.target) for run in self.runs]

    @property
    def steps(self) -> list[int]:
        """The steps of each run until the mean reward was reached, or all."""
        return [count or len(run.seconds) for run, count in zip(self.runs, self.counts, strict=True)]

    @property
    def seconds(self) -> list[float]:
        """The seconds that these steps of each run took."""
        return [sum(run.seconds[:steps]) for run, steps in zip(self.runs, self.steps, strict=True)]

    @property
    def last_reward(self) -> float:
        """The mean reward of the last three of these steps, over all runs."""
        pairs = zip(self.runs, self.steps, strict=True)
        return statistics.fmean(reward for run, steps in pairs for reward in run.rewards[:steps][-AVERAGED_STEPS:])

    def ratio(self, base: Side) -> str:
        """Return the median seconds as a share of the other side's; "" if some run did not reach the reward."""
        if None in self.counts:
            return ""
        # A run that did not reach the reward would need more seconds than it had.
        bound = "less than " if None in base.counts else ""
        return f"{bound}{statistics.median(self.seconds) / statistics.median(base.seconds):.2f}"


def reached(rewards: Sequence[float], target: float) -> int | None:
    """Return after how many steps the mean of the last three was at least ``target``; None if it never was."""
    for count in range(AVERAGED_STEPS, len(rewards) + 1):
        if sum(rewards[count - AVERAGED_STEPS : count]) / AVERAGED_STEPS >= target:
            return count
    return None


def work_of_the_demo() -> Work:
    """Return the settings of demo.env as TRL needs them."""
    return Work(
        model=DEMO["MODEL_NAME"],
        prompts=int(DEMO["BATCH_SIZE"]),
        group_size=int(DEMO["GROUP_SIZE"]),
        completion_tokens=int(DEMO["MAX_NEW_TOKENS"]),
        learning_rate=float(DEMO["LEARNING_RATE"]),
        steps=MOST_STEPS,
    )


def ours(seed: int, target: float, limit_seconds: float) -> Steps:
    """Train with the job group."""
    settings = {
        **DEMO,
        "MAX_STEPS": MOST_STEPS,
        "EVAL_PROMPTS": 0,
        "NUM_EPOCHS": 100,
        "MIN_WORKERS": 1,
        "KEEP_MEMORY": "true",
        # TRL computes in float32 on every processor.
        "COMPUTE_TYPE": "float32",
        "SEED": seed,
    }

    def is_enough(steps: JobSteps) -> bool:
        run = Steps.of_job(steps)
        return reached(run.rewards, target) is not None or sum(run.seconds) > limit_seconds

    return Steps.of_job(run_job("jobgroup.yaml", settings, {"rollout-server": 1, "ppo-trainer": 1}, is_enough))


def show(sides: Sequence[Side]) -> Table:
    """Return steps, seconds, and the ratio to the last side, TRL, as a table."""
    return harness.table(
        f"to a mean reward of {sides[0].target:g}, float32, {cores()} cores; to reach: {RATIO_TARGET:g} of TRL's",
        ("", "reached", "steps", "seconds", "of TRL's", "mean reward of the last three"),
        [
            (
                side.name,
                f"{sum(count is not None for count in side.counts)} of {len(side.counts)}",
                spread(side.steps, 0),
                spread(side.seconds, 0),
                side.ratio(sides[-1]),
                f"{side.last_reward:.2f}",
            )
            for side in sides
        ],
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
    limit = 60 * given.minutes
    work = replace(work_of_the_demo(), target=given.reward, limit_seconds=limit)
    sides = [Side("ours", given.reward), Side("TRL", given.reward)]

    def measure(side: Side) -> str:
        seed = len(side.runs)
        if side is sides[0]:
            side.runs.append(ours(seed, given.reward, limit))
        else:
            side.runs.append(trl_side.train(replace(work, seed=seed), given.trl_python))
        return f"{side.seconds[-1]:.0f} s"

    harness.in_turn(sides, given.rounds, measure)
    harness.finish(given, [show(sides)], {"work": work, "threads": cores(), "sides": sides})


if __name__ == "__main__":
    main()
