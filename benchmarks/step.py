"""Measures whole GRPO steps of the job group on this machine against TRL's GRPOTrainer, alternating, in one run.

    python -m benchmarks.step --trl-python .venv-trl/bin/python [--quick] [--json FILE]

Both train the model on the demo's questions with as many prompts, completions, tokens and threads, in float32 (or, with
--bf16, in bfloat16), without replay. Ours is the whole job group: services, router, engine and trainer as processes,
weights published to the engine through the file system. A step's seconds are all of it, from prompts to weights that
serve. The first step of each round warms up and is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common import trl_side
from benchmarks.common.ending import end_in_order
from benchmarks.common.figures import spread
from benchmarks.common.job import QUESTIONS, run_job
from benchmarks.common.trl_side import Steps, Work
from local_runner.environment import cores

TARGET = 0.2
"""Of TRL's seconds."""


@dataclass
class Side:
    """What was measured of one of the two."""

    name: str
    step_seconds: list[float] = field(default_factory=list)
    rewards: list[list[float]] = field(default_factory=list)

    def add(self, steps: Steps) -> None:
        """Adds a round, without its first step."""
        self.step_seconds += steps.seconds[1:]
        self.rewards.append(steps.rewards)


def ours(work: Work, rollout_nodes: int, trainer_nodes: int) -> Steps:
    """The steps of the job group."""
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
        # TRL keeps all logits, too.
        "LOGIT_CHUNK_TOKENS": work.prompts * work.group_size * work.completion_tokens,
        "MAX_STEPS": work.steps,
        "SEED": work.seed,
    }
    steps = run_job("jobgroup.yaml", settings, {"rollout-server": rollout_nodes, "ppo-trainer": trainer_nodes})
    return Steps([step["seconds_step"] for step in steps], [step["reward_mean"] for step in steps])


def show(work: Work, sides: Sequence[Side], threads: int) -> Table:
    """Medians, spreads and ratios to the last side, TRL."""
    kind = "bfloat16" if work.bf16 else "float32"
    table = Table(
        title=f"{work.prompts} prompts of {work.group_size} completions of at most {work.completion_tokens} tokens, "
        f"{kind}, {threads} threads; to reach: {TARGET:g} of TRL's"
    )
    for name in ("", "seconds a step", "of TRL's", "mean reward, last step"):
        table.add_column(name, justify="right" if name else "left")
    base = statistics.median(sides[-1].step_seconds)
    for side in sides:
        ratio = statistics.median(side.step_seconds) / base
        reward = statistics.fmean(rewards[-1] for rewards in side.rewards)
        table.add_row(side.name, spread(side.step_seconds, 1), f"{ratio:.2f}", f"{reward:.2f}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step")
    parser.add_argument("--trl-python", required=True, help="an interpreter with TRL; `make bench` installs one")
    parser.add_argument("--model", default=".cache/models/smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--completion-tokens", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--steps", type=int, default=4, help="steps of a round, the first of which warms up")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each")
    parser.add_argument("--rollout-nodes", type=int, default=1)
    parser.add_argument("--trainer-nodes", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one round of three steps")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    given = parser.parse_args(arguments)
    end_in_order()
    if given.quick:
        given.rounds, given.steps = 1, 3
    work = Work(
        model=given.model,
        prompts=given.prompts,
        group_size=given.group_size,
        completion_tokens=given.completion_tokens,
        learning_rate=given.learning_rate,
        steps=given.steps,
        bf16=given.bf16,
    )
    sides = [Side("ours"), Side("TRL")]
    for number in range(given.rounds):
        for side in sides:
            started = time.monotonic()
            if side is sides[0]:
                side.add(ours(work, given.rollout_nodes, given.trainer_nodes))
            else:
                side.add(trl_side.train(work, given.trl_python, cores()))
            print(f"round {number + 1}, {side.name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    Console().print(show(work, sides, cores()))
    if given.json:
        result = {"work": asdict(work), "threads": cores(), "sides": [asdict(side) for side in sides]}
        given.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
