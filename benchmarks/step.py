"""Measure whole GRPO steps of the job group on this machine against TRL's GRPOTrainer.

    python -m benchmarks.step --trl-python .venv-trl/bin/python [--quick] [--json FILE]

Both sides train the model on the demo's questions with the same numbers of prompts, completions, tokens and threads,
without replay, in bfloat16 on a processor with instructions for it and in float32 on others. Ours is the whole job
group: services, router, engine and trainer are processes, and weights reach the engine through the file system. The
seconds of a step include everything, from prompts until the new weights serve. The first step of each round warms up
and is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from benchmarks.common import harness
from benchmarks.common.harness import spread
from benchmarks.common.job import QUESTIONS
from benchmarks.common.trl_side import Side, Work, train_job_group, train_trl
from services.core.machine import cores

TARGET = 0.2
"""The aim, as a share of TRL's seconds."""


def show(work: Work, sides: Sequence[Side]) -> Table:
    """Return medians, spreads and ratios to the last side, TRL, as a table."""
    seconds = [[second for run in side.runs for second in run.seconds[1:]] for side in sides]
    base = statistics.median(seconds[-1])
    rows = []
    for side, measured in zip(sides, seconds, strict=True):
        reward = statistics.fmean(run.rewards[-1] for run in side.runs)
        rows.append((side.name, spread(measured, 1), f"{statistics.median(measured) / base:.2f}", f"{reward:.2f}"))
    return harness.table(
        f"{work.prompts} prompts of {work.group_size} completions of at most {work.completion_tokens} tokens, "
        f"{work.dtype}, {cores()} threads; to reach: {TARGET:g} of TRL's",
        ("", "seconds a step", "of TRL's", "mean reward, last step"),
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("step", rounds=2, quick="one round of three steps")
    parser.add_argument("--trl-python", required=True, help="an interpreter with TRL; `make bench` installs one")
    parser.add_dtype()
    parser.add_argument("--model", default=".cache/models/smollm2-135m")
    for name, default in {"prompts": 8, "group-size": 8, "completion-tokens": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round, the first of which warms up")
    given = parser.parse(arguments)
    if given.quick:
        given.steps = 3
    work = harness.made_of(Work, given)
    sides = [
        Side("ours", lambda seed: train_job_group(QUESTIONS, work, seed)),
        Side("TRL", lambda seed: train_trl(work, seed, given.trl_python)),
    ]
    harness.in_turn(sides, given.rounds, Side.add_round)
    harness.finish(given, [show(work, sides)], {"work": work, "runs": {side.name: side.runs for side in sides}})


if __name__ == "__main__":
    main()
