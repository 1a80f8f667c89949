"""Whole GRPO steps, and the time to a mean reward: the job group on this machine against TRL's GRPOTrainer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from benchmarks import harness, trl_runs
from benchmarks.harness import DTYPE, MODEL, Args, Benchmark, Option, Side, spread
from benchmarks.job import DEMO, JOB_GROUP, QUESTIONS, Steps, run_job
from services.core.machine import cores

STEP_TARGET, REWARD_TARGET = 0.2, 0.25
"""The aims, as shares of TRL's seconds."""
AVERAGED_STEPS = 3
MOST_STEPS = 60
REWARD_SETTINGS = DEMO | {
    "EVAL_PROMPTS": "0",
    "NUM_EPOCHS": "100",
    "KEEP_MEMORY": "true",
    "MAX_STEPS": str(MOST_STEPS),
    "COMPUTE_TYPE": "float32",
    "ENGINE_DTYPE": "float32",
    "PUBLISH_TYPE": "float32",
    "MIN_WORKERS": "1",
}
"""The settings of both sides in the time to a mean reward."""
TRL_PYTHON = Option(None, "an interpreter with TRL; `make bench` installs one", is_required=True)

Measured = dict[str, list[float]]
"""The ``seconds`` and the mean ``rewards`` of the steps of a run."""


def both_sides(
    settings: Mapping[str, str],
    python: str,
    is_enough: Callable[[Measured], bool] = lambda _: False,
    *,
    target: float | None = None,
    limit_seconds: float | None = None,
) -> list[Side]:
    """Return this project's side, a job group with one rollout and one trainer node, and TRL's; rounds are seeds."""

    def ours(seed: int) -> Measured:
        nodes = {"rollout-server": 1, "ppo-trainer": 1}
        return measured(run_job(JOB_GROUP, {**settings, "SEED": str(seed)}, nodes, lambda s: is_enough(measured(s))))

    def theirs(seed: int) -> Measured:
        seeded = {**settings, "SEED": str(seed)}
        steps = trl_runs.train(seeded, python, threads=cores(), target=target, limit_seconds=limit_seconds)
        return {"seconds": [step["seconds"] for step in steps], "rewards": [step["reward"] for step in steps]}

    return [Side("ours", ours), Side("TRL", theirs)]


def measured(steps: Steps) -> Measured:
    """Return the seconds and the rewards in a run's metrics.jsonl."""
    return {"seconds": [step["seconds_step"] for step in steps], "rewards": [step["reward_mean"] for step in steps]}


def measure_steps(args: Args) -> list[Side]:
    """Measure whole GRPO steps of the job group on this machine against TRL's GRPOTrainer.

    Both sides train the model on the demo's questions with the same numbers of prompts, completions, tokens and
    threads, without replay, in bfloat16 on a processor with instructions for it and in float32 on others. Ours is the
    whole job group: services, router, engine and trainer are processes, and weights reach the engine through the file
    system. The seconds of a step include everything, from prompts until the new weights serve. The first step of each
    round warms up and is left out.
    """
    settings = QUESTIONS | {
        "MODEL_NAME": args.model,
        "BATCH_SIZE": str(args.prompts),
        "GROUP_SIZE": str(args.group_size),
        "MAX_NEW_TOKENS": str(args.completion_tokens),
        "LEARNING_RATE": "1e-5",
        "COMPUTE_TYPE": args.dtype,
        "ENGINE_DTYPE": args.dtype,
        "PUBLISH_TYPE": args.dtype,
        "MAX_STEPS": str(args.steps),
        "MIN_WORKERS": "1",
    }
    return harness.in_turn(both_sides(settings, args.trl_python), args.rounds)


def step_tables(args: Args, sides: Sequence[Side]) -> list[Table]:
    """Return medians, spreads and ratios to the last side, TRL."""
    seconds = {side.name: [second for one in side.rounds for second in one["seconds"][1:]] for side in sides}
    base = statistics.median(seconds[sides[-1].name])
    title = (
        f"{args.prompts} prompts of {args.group_size} completions of at most {args.completion_tokens} tokens, "
        f"{args.dtype}, {cores()} threads; to reach: {STEP_TARGET:g} of TRL's"
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


def measure_reward(args: Args) -> list[Side]:
    """Measure how long the demo's task takes to a mean reward of 0.9, for the job group and for TRL's GRPOTrainer.

    Ours is jobgroup.yaml with examples/demo.env, without its evaluations, on one trainer node and one rollout node.
    Each has all cores, because they compute in turn. TRL trains the same model on the same questions with the same
    numbers of prompts, completions and tokens, at the same learning rate, in float32 on all cores. The reward counts as
    reached when the mean of three steps reaches it. The seconds are those of the steps until then, without the start.
    Neither side trains longer than --minutes. Every round has its own seed, because luck decides over some steps.
    """
    most = 60 * args.minutes

    def is_enough(run: Measured) -> bool:
        return reached(run["rewards"], args.reward) is not None or sum(run["seconds"]) > most

    sides = both_sides(REWARD_SETTINGS, args.trl_python, is_enough, target=args.reward, limit_seconds=most)
    return harness.in_turn(sides, args.rounds)


def reward_tables(args: Args, sides: Sequence[Side]) -> list[Table]:
    """Return steps, seconds, and the ratio to the last side, TRL.

    A run that did not reach the reward would need more seconds than it had. So its side has no ratio, and the ratio of
    the other side is a bound.
    """
    target: float = args.reward
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
