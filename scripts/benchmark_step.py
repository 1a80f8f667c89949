"""Measures whole GRPO steps of the job group on this machine against TRL's GRPOTrainer, alternating, in one run.

    python -m scripts.benchmark_step --trl-python .venv-trl/bin/python [--to-reward 0.9] [--json FILE]

Both train the model on the demo's questions with as many prompts, completions, tokens and threads, in float32 (or, with
--bf16, in bfloat16), without replay. Ours is the whole job group: services, router, engine and trainer as processes,
weights published to the engine through the file system. A step's seconds are all of it, from prompts to weights that
serve. The first step of each round warms up and is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from scripts.benchmarks.job import ROOT, TEMPLATE, run, run_job
from scripts.local.environment import cores
from services.data_server.arithmetic import questions

MOST_STEPS = 20
"""Of a round that is to reach a reward."""


@dataclass(frozen=True)
class Work:
    """What both train."""

    model: str
    prompts: int
    group_size: int
    completion_tokens: int
    learning_rate: float
    bf16: bool
    steps: int
    target: float | None
    seed: int = 0


@dataclass
class Side:
    """What was measured of one of the two."""

    name: str
    step_seconds: list[float] = field(default_factory=list)
    seconds_to_target: list[float] = field(default_factory=list)
    rewards: list[list[float]] = field(default_factory=list)

    def add(self, seconds: Sequence[float], rewards: Sequence[float], target: float | None) -> None:
        """Adds a round."""
        self.step_seconds += seconds[1:]
        self.rewards.append(list(rewards))
        if target is not None:
            reached = [i for i in range(2, len(rewards)) if sum(rewards[i - 2 : i + 1]) / 3 >= target]
            if reached:
                self.seconds_to_target.append(sum(seconds[: reached[0] + 1]))


def ours(work: Work, rollout_nodes: int, trainer_nodes: int) -> tuple[list[float], list[float]]:
    """Seconds and rewards of the steps of the job group."""
    settings = {
        "MODEL_NAME": work.model,
        "BATCH_SIZE": work.prompts,
        "GROUP_SIZE": work.group_size,
        "MAX_NEW_TOKENS": work.completion_tokens,
        "LEARNING_RATE": work.learning_rate,
        "COMPUTE_TYPE": "bfloat16" if work.bf16 else "float32",
        "MAX_STEPS": work.steps,
        "SEED": work.seed,
    }
    steps = run_job("jobgroup.yaml", settings, {"rollout-server": rollout_nodes, "ppo-trainer": trainer_nodes})
    return [step["seconds_step"] for step in steps], [step["reward_mean"] for step in steps]


def trl(work: Work, python: str, threads: int) -> tuple[list[float], list[float]]:
    """The same of TRL."""
    with tempfile.TemporaryDirectory() as directory:
        rows, _ = questions(digits=[1], operations="+", template=TEMPLATE, seed=0)
        file = Path(directory) / "questions.jsonl"
        file.write_bytes(b"".join(orjson.dumps({"question": q.text, "answer": q.answer}) + b"\n" for q in rows))
        # It looks for its model relative to its own working directory.
        model = str(Path(work.model).resolve()) if Path(work.model).is_dir() else work.model
        given = {**asdict(work), "model": model, "questions": str(file), "directory": directory, "threads": threads}
        program = str(ROOT / "scripts/benchmarks/trl_grpo.py")
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        output = run([python, program, json.dumps(given)], environment=environment)
    steps = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    return [step["seconds"] for step in steps], [step["reward"] for step in steps]


def show(work: Work, sides: Sequence[Side], threads: int) -> Table:
    """Medians, spreads and ratios."""
    kind = "bfloat16" if work.bf16 else "float32"
    table = Table(
        title=f"{work.prompts} prompts of {work.group_size} completions of at most {work.completion_tokens} tokens, "
        f"{kind}, {threads} threads"
    )
    for name in ("", "step s", "from", "to", "ratio", "s to target", "ratio"):
        table.add_column(name, justify="right")
    base = sides[0]
    for side in sides:
        step = statistics.median(side.step_seconds)
        target = statistics.median(side.seconds_to_target) if side.seconds_to_target else None
        ratio = step / statistics.median(base.step_seconds)
        target_ratio = ""
        if target is not None and base.seconds_to_target:
            target_ratio = f"{target / statistics.median(base.seconds_to_target):.2f}"
        table.add_row(
            side.name,
            f"{step:.1f}",
            f"{min(side.step_seconds):.1f}",
            f"{max(side.step_seconds):.1f}",
            f"{ratio:.2f}",
            "" if target is None else f"{target:.0f}",
            target_ratio,
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmark_step")
    parser.add_argument("--trl-python", required=True, help="an interpreter with TRL; `make bench` installs one")
    parser.add_argument("--model", default=".cache/models/smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--completion-tokens", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--steps", type=int, default=4, help="steps of a round, the first of which warms up")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each")
    parser.add_argument("--to-reward", type=float, help="train until the mean reward of three steps is this")
    parser.add_argument("--rollout-nodes", type=int, default=1)
    parser.add_argument("--trainer-nodes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    given = parser.parse_args(arguments)
    work = Work(
        model=given.model,
        prompts=given.prompts,
        group_size=given.group_size,
        completion_tokens=given.completion_tokens,
        learning_rate=given.learning_rate,
        bf16=given.bf16,
        steps=MOST_STEPS if given.to_reward else given.steps,
        target=given.to_reward,
    )
    sides = [Side("ours"), Side("TRL")]
    for number in range(given.rounds):
        for side in sides:
            started = time.monotonic()
            if side is sides[0]:
                seconds, rewards = ours(work, given.rollout_nodes, given.trainer_nodes)
            else:
                seconds, rewards = trl(work, given.trl_python, cores())
            side.add(seconds, rewards, work.target)
            print(f"round {number + 1}, {side.name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    Console().print(show(work, sides, cores()))
    if given.json:
        result = {"work": asdict(work), "threads": cores(), "sides": [asdict(side) for side in sides]}
        given.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
