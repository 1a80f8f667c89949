"""Whole GRPO steps, and the time to a mean reward: the job group on this machine against TRL's GRPOTrainer."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from rich.table import Table

from benchmarks import harness
from benchmarks.harness import DTYPE, MODEL, ROOT, Benchmark, Given, Option, Side, spread
from benchmarks.job import DEMO, JOB_GROUP, QUESTIONS, RUN_SECONDS, Steps, run_job
from services.core.machine import cores
from services.data_server.generators import arithmetic_questions

STEP_TARGET, REWARD_TARGET = 0.2, 0.25
"""The aims, as shares of TRL's seconds."""
AVERAGED_STEPS = 3
MOST_STEPS = 60
SETTINGS = DEMO | {"EVAL_PROMPTS": "0", "NUM_EPOCHS": "100", "KEEP_MEMORY": "true"}
"""The settings of our side in the time to a mean reward."""
TRL_PYTHON = Option(None, "an interpreter with TRL; `make bench` installs one", is_required=True)

Measured = dict[str, list[float]]
"""The ``seconds`` and the mean ``rewards`` of the steps of a run."""


@dataclass(frozen=True)
class Work:
    """The training that both sides do."""

    model: str
    prompts: int
    group_size: int
    completion_tokens: int
    steps: int
    learning_rate: float = 1e-5
    target: float | None = None
    """Training stops when the mean reward of three steps is at least this."""
    limit_seconds: float | None = None
    """Training stops after the step in which it exceeds this time."""
    dtype: str = "float32"
    """``float32`` or ``bfloat16``: what both sides compute in. Their weights are float32."""


def train_job_group(
    base: Mapping[str, object], work: Work, seed: int, is_enough: Callable[[Measured], bool] = lambda _: False
) -> Measured:
    """Train with the job group, one rollout and one trainer node, by the settings ``base`` and those of the work."""
    settings = {
        **base,
        "MODEL_NAME": work.model,
        "BATCH_SIZE": work.prompts,
        "GROUP_SIZE": work.group_size,
        "MAX_NEW_TOKENS": work.completion_tokens,
        "LEARNING_RATE": work.learning_rate,
        "COMPUTE_TYPE": work.dtype,
        "ENGINE_DTYPE": work.dtype,
        "PUBLISH_TYPE": work.dtype,
        "MAX_STEPS": work.steps,
        "MIN_WORKERS": 1,
        "SEED": seed,
    }
    nodes = {"rollout-server": 1, "ppo-trainer": 1}
    return measured(run_job(JOB_GROUP, settings, nodes, lambda steps: is_enough(measured(steps))))


def measured(steps: Steps) -> Measured:
    """Return the seconds and the rewards in a run's metrics.jsonl."""
    return {"seconds": [step["seconds_step"] for step in steps], "rewards": [step["reward_mean"] for step in steps]}


def train_trl(work: Work, seed: int, python: str) -> Measured:
    """Run TRL's GRPOTrainer on the demo's questions by the interpreter ``python``, which must have TRL."""
    with tempfile.TemporaryDirectory() as directory:
        rows, _ = arithmetic_questions(
            digits=[int(QUESTIONS["ARITHMETIC_DIGITS"])],
            operations=QUESTIONS["ARITHMETIC_OPERATIONS"],
            template=QUESTIONS["ARITHMETIC_TEMPLATE"],
            seed=0,
        )
        file = Path(directory) / "questions.jsonl"
        file.write_bytes(b"".join(orjson.dumps({"prompt": q.question, "answer": q.answer}) + b"\n" for q in rows))
        # TRL would look for a relative path on the hub.
        model = str(Path(work.model).resolve()) if Path(work.model).is_dir() else work.model
        given = {
            **asdict(work),
            "seed": seed,
            "threads": cores(),
            "model": model,
            "questions": str(file),
            "directory": directory,
        }
        command = [python, str(ROOT / "benchmarks/trl_grpo.py"), json.dumps(given)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(cores())}
        with harness.programs([command], [environment], RUN_SECONDS) as [process]:
            output = harness.output_of(process, "TRL")
    steps = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    return {"seconds": [step["seconds"] for step in steps], "rewards": [step["reward"] for step in steps]}


def measure_steps(given: Given) -> list[Side]:
    """Measure whole GRPO steps of the job group on this machine against TRL's GRPOTrainer.

    Both sides train the model on the demo's questions with the same numbers of prompts, completions, tokens and
    threads, without replay, in bfloat16 on a processor with instructions for it and in float32 on others. Ours is the
    whole job group: services, router, engine and trainer are processes, and weights reach the engine through the file
    system. The seconds of a step include everything, from prompts until the new weights serve. The first step of each
    round warms up and is left out.
    """
    work = harness.made_of(Work, given)
    sides = [
        Side("ours", lambda seed: train_job_group(QUESTIONS, work, seed)),
        Side("TRL", lambda seed: train_trl(work, seed, given.trl_python)),
    ]
    return harness.in_turn(sides, given.rounds)


def step_tables(given: Given, sides: Sequence[Side]) -> list[Table]:
    """Return medians, spreads and ratios to the last side, TRL."""
    seconds = {side.name: [second for one in side.rounds for second in one["seconds"][1:]] for side in sides}
    base = statistics.median(seconds[sides[-1].name])
    title = (
        f"{given.prompts} prompts of {given.group_size} completions of at most {given.completion_tokens} tokens, "
        f"{given.dtype}, {cores()} threads; to reach: {STEP_TARGET:g} of TRL's"
    )
    columns: harness.Columns = {
        "": harness.name_of,
        "seconds a step": lambda side: spread(seconds[side.name], 1),
        "of TRL's": lambda side: f"{statistics.median(seconds[side.name]) / base:.2f}",
        "mean reward, last step": lambda side: f"{statistics.fmean(one['rewards'][-1] for one in side.rounds):.2f}",
    }
    return [harness.table(title, sides, columns)]


STEP = Benchmark(
    measure=measure_steps,
    tables=step_tables,
    rounds=2,
    quick={"steps": 3},
    options={
        "trl-python": TRL_PYTHON,
        "dtype": DTYPE,
        "model": MODEL,
        "prompts": Option(8),
        "group-size": Option(8),
        "completion-tokens": Option(12),
        "steps": Option(4, "steps of a round, the first of which warms up"),
    },
)


def reached(rewards: Sequence[float], target: float) -> int | None:
    """Return after how many steps the mean of the last three was at least ``target``; None if it never was."""
    for count in range(AVERAGED_STEPS, len(rewards) + 1):
        if sum(rewards[count - AVERAGED_STEPS : count]) / AVERAGED_STEPS >= target:
            return count
    return None


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


def measure_reward(given: Given) -> list[Side]:
    """Measure how long the demo's task takes to a mean reward of 0.9, for the job group and for TRL's GRPOTrainer.

    Ours is jobgroup.yaml with examples/demo.env, without its evaluations, on one trainer node and one rollout node.
    Each has all cores, because they compute in turn. TRL trains the same model on the same questions with the same
    numbers of prompts, completions and tokens, at the same learning rate, in float32 on all cores. The reward counts as
    reached when the mean of three steps reaches it. The seconds are those of the steps until then, without the start.
    Neither side trains longer than --minutes. Every round has its own seed, because luck decides over some steps.
    """
    work = work_of_the_demo(given.reward, 60 * given.minutes)

    def is_enough(run: Measured) -> bool:
        return reached(run["rewards"], given.reward) is not None or sum(run["seconds"]) > 60 * given.minutes

    sides = [
        Side("ours", lambda seed: train_job_group(SETTINGS, work, seed, is_enough)),
        Side("TRL", lambda seed: train_trl(work, seed, given.trl_python)),
    ]
    return harness.in_turn(sides, given.rounds)


def reward_tables(given: Given, sides: Sequence[Side]) -> list[Table]:
    """Return steps, seconds, and the ratio to the last side, TRL.

    A run that did not reach the reward would need more seconds than it had. So its side has no ratio, and the ratio of
    the other side is a bound.
    """
    target: float = given.reward
    is_reached = {side.name: [reached(one["rewards"], target) is not None for one in side.rounds] for side in sides}

    def until(side: Side, name: str) -> list[list[float]]:
        return [one[name][: reached(one["rewards"], target)] for one in side.rounds]

    def seconds(side: Side) -> list[float]:
        return [sum(one) for one in until(side, "seconds")]

    def ratio(side: Side) -> str:
        if not all(is_reached[side.name]):
            return ""
        bound = "" if all(is_reached[sides[-1].name]) else "less than "
        return f"{bound}{statistics.median(seconds(side)) / statistics.median(seconds(sides[-1])):.2f}"

    def last_rewards(side: Side) -> str:
        return f"{statistics.fmean(one for run in until(side, 'rewards') for one in run[-AVERAGED_STEPS:]):.2f}"

    title = f"to a mean reward of {target:g}, float32, {cores()} cores; to reach: {REWARD_TARGET:g} of TRL's"
    columns: harness.Columns = {
        "": harness.name_of,
        "reached": lambda side: f"{sum(is_reached[side.name])} of {len(side.rounds)}",
        "steps": lambda side: spread([len(one) for one in until(side, "seconds")], 0),
        "seconds": lambda side: spread(seconds(side), 0),
        "of TRL's": ratio,
        "mean reward of the last three": last_rewards,
    }
    return [harness.table(title, sides, columns)]


REWARD = Benchmark(
    measure=measure_reward,
    tables=reward_tables,
    rounds=3,
    quick={"reward": 0.3, "minutes": 1.0},
    options={
        "trl-python": TRL_PYTHON,
        "reward": Option(0.9, "the mean reward to reach"),
        "minutes": Option(12.0, "the longest that one side may train"),
    },
)
