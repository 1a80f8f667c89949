"""Measure whole GRPO steps of the job group on this machine against TRL's GRPOTrainer.

    python -m benchmarks.step --trl-python .venv-trl/bin/python [--quick] [--json FILE]

Both sides train the model on the demo's questions with the same numbers of prompts, completions, tokens and threads, in
float32 (or, with --bf16, in bfloat16), without replay. Ours is the whole job group: services, router, engine and
trainer are processes, and weights reach the engine through the file system. The seconds of a step include everything,
from prompts until the new weights serve. The first step of each round warms up and is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from benchmarks.common import harness, trl_side
from benchmarks.common.harness import spread
from benchmarks.common.job import QUESTIONS, run_job
from benchmarks.common.trl_side import Steps, Work
from local_runner.environment import cores

TARGET = 0.2
"""The aim, as a share of TRL's seconds."""


@dataclass
class Side:
    """One of the two sides and its rounds."""

    name: str
    step_seconds: list[float] = field(default_factory=list)
    last_rewards: list[float] = field(default_factory=list)

    def add(self, steps: Steps) -> str:
        """Add a round without its first step; return what to print of it."""
        self.step_seconds += steps.seconds[1:]
        self.last_rewards.append(steps.rewards[-1])
        return f"{statistics.median(steps.seconds[1:]):.1f} s a step"


def ours(work: Work, rollout_nodes: int, trainer_nodes: int) -> Steps:
    """Train with the job group."""
    precision = "bfloat16" if work.bf16 else "float32"
    settings = {
        **QUESTIONS,
        "MODEL_NAME": work.model,
        "BATCH_SIZE": work.prompts,
        "GROUP_SIZE": work.group_size,
        "MAX_NEW_TOKENS": work.completion_tokens,
        "LEARNING_RATE": work.learning_rate,
        "COMPUTE_TYPE": precision,
        "ENGINE_DTYPE": precision,
        "PUBLISH_TYPE": precision,
        "MAX_STEPS": work.steps,
        "SEED": work.seed,
    }
    nodes = {"rollout-server": rollout_nodes, "ppo-trainer": trainer_nodes}
    return Steps.of_job(run_job("jobgroup.yaml", settings, nodes))


def show(work: Work, sides: Sequence[Side]) -> Table:
    """Return medians, spreads and ratios to the last side, TRL, as a table."""
    base = statistics.median(sides[-1].step_seconds)
    return harness.table(
        f"{work.prompts} prompts of {work.group_size} completions of at most {work.completion_tokens} tokens, "
        f"{'bfloat16' if work.bf16 else 'float32'}, {cores()} threads; to reach: {TARGET:g} of TRL's",
        ("", "seconds a step", "of TRL's", "mean reward, last step"),
        [
            (
                side.name,
                spread(side.step_seconds, 1),
                f"{statistics.median(side.step_seconds) / base:.2f}",
                f"{statistics.fmean(side.last_rewards):.2f}",
            )
            for side in sides
        ],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("step", rounds=2, quick="one round of three steps")
    parser.add_argument("--trl-python", required=True, help="an interpreter with TRL; `make bench` installs one")
    parser.add_argument("--model", default=".cache/models/smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--completion-tokens", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--steps", type=int, default=4, help="steps of a round, the first of which warms up")
    parser.add_argument("--rollout-nodes", type=int, default=1)
    parser.add_argument("--trainer-nodes", type=int, default=1)
    given = parser.parse(arguments)
    if given.quick:
        given.steps = 3
    work = harness.made_of(Work, given)
    sides = [Side("ours"), Side("TRL")]

    def measure(side: Side) -> str:
        if side is sides[0]:
            return side.add(ours(work, given.rollout_nodes, given.trainer_nodes))
        return side.add(trl_side.train(work, given.trl_python))

    harness.in_turn(sides, given.rounds, measure)
    harness.finish(given, [show(work, sides)], {"work": work, "threads": cores(), "sides": sides})


if __name__ == "__main__":
    main()
