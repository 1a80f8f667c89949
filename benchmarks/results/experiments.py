"""The experiments of docs/results.md: for each part its tasks, seeds and variants, with the functions that run them.

A variant is a name with the settings that differ from the task's, and the function that makes its runs. The text of a
part is the section of page.md whose heading has its name in braces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.job import Job, kill
from benchmarks.results import distillation, examples, in_process, job_runs, methods, mix, off_policy
from benchmarks.results.beside_trl import OURS, TRL, seconds_to, stages, train_trl
from benchmarks.results.episodes import (
    AGENT_SETTINGS,
    ENVIRONMENT_SETTINGS,
    below_random,
    random_play,
    train_agent,
    train_environment,
)
from benchmarks.results.plots import by_clock
from benchmarks.results.rounding import train_from_bfloat16
from benchmarks.results.runs import Part, Result, Results, Run, Settings, Train, runs_of
from benchmarks.results.tasks import DEMO_TASK, TINY
from local_runner.spec import env_file
from services.core.errors import ConfigurationError

Variants = dict[str, tuple[Settings, Train]]


def variants(by_name: Mapping[str, Settings], train: Train = in_process.train) -> Variants:
    """Return variants that one function makes; by default in this process."""
    return {name: (settings, train) for name, settings in by_name.items()}


# --- equal ways -------------------------------------------------------------------------------------------------------


def kill_trainer(job: Job, *, after: int) -> None:
    """Kill the trainer after a step."""
    job.wait(lambda: len(job.steps()) >= after)
    kill(job, "ppo-trainer-0")


def asynchronous(staleness: int) -> tuple[Settings, Train]:
    """Return settings and function of a job group whose groups are at most ``staleness`` policy versions old."""
    train = partial(job_runs.train, job_group=ROOT / "jobgroups/async.yaml", nodes={"collector": 1})
    return {"MAX_STALENESS": str(staleness)}, train


def ways(checkpoint_every: int, killed_at: int) -> Variants:
    """Return the ways to train a task; a trainer is killed after the step ``killed_at``."""
    resumed = partial(job_runs.train, while_running=partial(kill_trainer, after=killed_at))
    return {
        "synchronous": ({}, job_runs.train),
        "one process": ({}, in_process.train),
        "killed and resumed": ({"CHECKPOINT_EVERY": str(checkpoint_every)}, resumed),
        "broadcast": ({"PUBLISH_TRANSPORT": "broadcast"}, job_runs.train),
        "two ranks": ({}, partial(job_runs.train, nodes={"ppo-trainer": 2})),
    }


BFLOAT16 = (dict.fromkeys(("COMPUTE_TYPE", "PUBLISH_TYPE", "ENGINE_DTYPE"), "bfloat16"), in_process.train)
WAYS: Variants = {
    **ways(checkpoint_every=8, killed_at=20),
    "four ranks": ({}, partial(job_runs.train, nodes={"ppo-trainer": 4})),
    **{f"asynchronous, staleness {bound}": asynchronous(bound) for bound in (1, 2, 4)},
    "bfloat16": BFLOAT16,
}
DEMO_WAYS: Variants = {
    **ways(checkpoint_every=2, killed_at=5),
    "asynchronous, staleness 1": asynchronous(1),
    "bfloat16": BFLOAT16,
    "LoRA": ({"LORA_RANK": "8", "LEARNING_RATE": str(10 * float(DEMO_TASK["LEARNING_RATE"]))}, in_process.train),
}

# --- staleness and replay ---------------------------------------------------------------------------------------------

AROUND_SAMPLER: Settings = {"IMPORTANCE_CORRECTION": "none"}
"""The ratio is against the policy that sampled, and the clip is around it."""
CLIPPED = "clipped around the policy that sampled"


def lagging(lag: int, settings: Settings | None = None) -> tuple[Settings, Train]:
    """Return a variant whose engine serves the weights of ``lag`` steps ago."""
    return settings or {}, partial(in_process.train, lag=lag)


BY_LAG: Variants = {
    **{name: lagging(lag) for name, lag in off_policy.LAGS.items()},
    **{f"lag {lag}, {CLIPPED}": lagging(lag, AROUND_SAMPLER) for lag in (1, 2, 4)},
    "lag 4, CISPO": lagging(4, {"LOSS": "cispo"}),
    "lag 4, IcePop": lagging(4, {"IMPORTANCE_CORRECTION": "icepop"}),
}
BY_BOUND: Variants = {
    "no lag": lagging(0),
    "lag 4": lagging(4),
    f"lag 4, {CLIPPED}": lagging(4, AROUND_SAMPLER),
    **{f"lag 4, weights up to {cap}": lagging(4, {"IMPORTANCE_CAP": cap}) for cap in ("1", "3", "5")},
    "lag 4, IcePop": lagging(4, {"IMPORTANCE_CORRECTION": "icepop"}),
    **{f"lag 4, KL up to {bound}": lagging(4, {"OFF_POLICY_MAX_KL": bound}) for bound in ("0.1", "0.5")},
}
STALENESS = [
    run
    for rate, lags in {"5e-4": BY_LAG, "2e-3": BY_BOUND, "4e-3": BY_BOUND}.items()
    for run in runs_of(f"learning rate {rate}", TINY | {"LEARNING_RATE": rate}, range(5), lags)
]

REPLAY: dict[str, Settings] = {
    "no replay": {},
    **{
        f"{groups} groups, KL to {bound}": {"REPLAY_GROUPS": groups, "REPLAY_MAX_KL": bound}
        for groups in ("4", "8")
        for bound in ("0.1", "1")
    },
}
SHORTER: dict[str, Settings] = {
    f"{groups} groups, KL to 1, {steps} steps": {"REPLAY_GROUPS": groups, "REPLAY_MAX_KL": "1", "MAX_STEPS": steps}
    for groups, steps in (("4", "31"), ("8", "26"))
}
"""Steps of the tiny task that take the processor time of its 40 without replay."""

# --- rounding ---------------------------------------------------------------------------------------------------------

ENGINES: dict[str, Settings] = {
    "float32 engine": {},
    "bfloat16 engine": {"ENGINE_DTYPE": "bfloat16"},
    "bfloat16 engine, ratio to the policy that sampled": {"ENGINE_DTYPE": "bfloat16"} | AROUND_SAMPLER,
}
PUBLISHED: Variants = {
    "float32": ({"PUBLISH_TYPE": "float32"}, train_from_bfloat16),
    "unbiased": ({"PUBLISH_TYPE": "bfloat16"}, train_from_bfloat16),
    "nearest": ({"PUBLISH_TYPE": "bfloat16"}, partial(train_from_bfloat16, is_nearest=True)),
}

# --- methods ----------------------------------------------------------------------------------------------------------

UNTRAINED: Variants = {
    "no training": ({"EVAL_SAMPLES": "8"}, in_process.evaluate),
    "best of 8, no training": ({"EVAL_SAMPLES": "8"}, partial(in_process.evaluate, best=True)),
}
"""Ways to use the policy as it is."""
AT_BEST_RATES = {name: settings | {"LEARNING_RATE": methods.RATES[name]} for name, settings in methods.METHODS.items()}
DEMO_METHODS = methods.one_update(critic_rate="1e-5") | {"overlong penalty": {"OVERLONG_BUFFER": "4"}}
# Rewards are 0 or 1, so that the best of a group are its right answers, but for groups that are all right.
del DEMO_METHODS["SFT on the group's best"]

# --- several rewards, teachers and examples ---------------------------------------------------------------------------

PARITY, LARGE, PERCENTAGE = (f"benchmarks.results.parity:{name}" for name in ("parity", "large", "percentage"))


def by_component(second: str, weight: str, *, equal: str) -> list[Run]:
    """Return the runs of parity beside a second reward: their weighted sum, GDPO, and the sum of equal scales.

    Args:
        second: the second reward.
        weight: its weight.
        equal: the weight with which it counts as much as parity, whose weight is 1.
    """
    task = TINY | {"REWARD_FN": f"{PARITY}=1,{second}={weight}", "LEARNING_RATE": "2e-3"}
    variants: dict[str, Settings] = {
        "weighted sum": {},
        "GDPO": {"ADVANTAGE": "gdpo"},
        "sum of equal weights": {"REWARD_FN": f"{PARITY}=1,{second}={equal}"},
    }
    train = partial(job_runs.train, columns=(f"reward_part_{PARITY}", f"reward_part_{second}"))
    name = "two rewards" if second == LARGE else "a percentage"
    return runs_of(name, task, range(5), {variant: (settings, train) for variant, settings in variants.items()})


def part_change(results: Results, task: str, variant: str, function: str) -> str:
    """Return the means of a reward function at the first and at the last step of a variant's runs."""
    return job_runs.change(_of_variant(results, task, variant), f"reward_part_benchmarks.results.parity:{function}")


def part_after(results: Results, task: str, variant: str, function: str) -> str:
    """Return the mean of a reward function at the last step of a variant's runs."""
    return job_runs.after(_of_variant(results, task, variant), f"reward_part_benchmarks.results.parity:{function}")


def _of_variant(results: Results, task: str, variant: str) -> list[Result]:
    return [result for result in results if (result.task, result.variant) == (task, variant)]


TAUGHT = TINY | {"LEARNING_RATE": "1e-3"}
UNSEEN = {"SEED": "1001", "DATA_SEED": "1001"}
"""The seeds of a teacher, which no student has."""
TEACHER = TINY | UNSEEN | {"LEARNING_RATE": "2e-3", "MAX_STEPS": "60"}
BY_TEACHER = {"by_tokens": distillation.by_tokens, "teacher_accuracy": distillation.teacher_accuracy}

# --- tasks ------------------------------------------------------------------------------------------------------------

QUESTIONS = 240
"""Questions of a generator, of which 16 steps train on 128."""
HELD_OUT = 72
GREEDY_TASK = DEMO_TASK | {"EVAL_SAMPLES": "0", "EVAL_PROMPTS": "52"}


def generator(name: str, tokens: int, **parameters: int) -> Settings:
    """Return the settings of a generator of reasoning-gym, asked level by level in one epoch.

    Args:
        name: the generator.
        tokens: MAX_NEW_TOKENS.
        parameters: replace those of both levels.
    """
    return GREEDY_TASK | {
        "DATASET": f"reasoning_gym:{name}",
        "DATASET_CONFIG": json.dumps({"size": QUESTIONS, "levels": [0, 1], name: parameters}),
        "DATASET_HELD_OUT": "0.4",
        "PROMPT_STYLE": "few_shot",
        "CURRICULUM": "source",
        "INSTRUCTION": "none",
        "REWARD_FN": "reasoning_gym",
        "MAX_NEW_TOKENS": str(tokens),
        "MICRO_BATCH_TOKENS": "2048",
        "NUM_EPOCHS": "1",
        "MAX_STEPS": "16",
        "EVAL_PROMPTS": str(HELD_OUT),
    }


TASKS: dict[str, Settings] = {
    "addition": GREEDY_TASK,
    "chain_sum": generator("chain_sum", 12, min_digits=1, max_digits=1),
    "spell_backward": generator("spell_backward", 14),
    "gcd": generator("gcd", 12, min_value=1, max_value=12),
    "letter_counting": generator("letter_counting", 12),
    "countdown": generator(
        "countdown", 16, min_numbers=2, max_numbers=2, min_value=1, max_value=9, min_target=2, max_target=18
    ),
}

FUNCTIONS = GREEDY_TASK | env_file(ROOT / "examples/demo-code.env")

SHARED: Settings = {"COMPUTE_TYPE": "float32", "MIN_WORKERS": "1", "KEEP_MEMORY": "true"}
PLAYED = ENVIRONMENT_SETTINGS | SHARED | {"ROLLOUT": "environment"}
NIM = {"ENVIRONMENT": "nim", "AGENT_MAX_TURNS": "16", "AGENT_MAX_TOKENS": "64"}
EPISODES: dict[str, tuple[Settings, Train]] = {
    "tool agent": (AGENT_SETTINGS | SHARED | {"ROLLOUT": "agent"}, train_agent),
    "guessing game": (PLAYED, train_environment),
    "Nim against itself": (PLAYED | NIM, train_environment),
}

GSM8K_DIRECTORY = "GSM8K_DIR"
"""The environment variable that names a directory with train.jsonl and test.jsonl, in place of the hub."""
GSM8K = DEMO_TASK | {
    "DATASET": "gsm8k",
    "PROMPT_STYLE": "few_shot",
    "REWARD_FN": "math=1,format=0.2",
    "BATCH_SIZE": "4",
    "MAX_NEW_TOKENS": "128",
    "MAX_STEPS": "8",
    "MICRO_BATCH_TOKENS": "2048",
    "EVAL_SAMPLES": "0",
    "EVAL_PROMPTS": "100",
}


def train_gsm8k(run: Run) -> Result:
    """Run the job group on the hub's GSM8K, or on the files of GSM8K_DIR.

    Raises:
        ConfigurationError: GSM8K_DIR lacks a file.
    """
    settings = dict(run.settings)
    if directory := os.environ.get(GSM8K_DIRECTORY):
        for name, file in (("DATASET", "train.jsonl"), ("DATASET_TEST", "test.jsonl")):
            path = Path(directory) / file
            if not path.is_file():
                raise ConfigurationError(f"{GSM8K_DIRECTORY}: there is no {path}; give a directory with GSM8K's files")
            settings[name] = str(path.resolve())
    columns = ("reward_part_format", "reward_part_math", "truncation_rate")
    result = job_runs.train(replace(run, settings=settings), columns=columns)
    result.settings = dict(run.settings)
    return result


# --- the table --------------------------------------------------------------------------------------------------------

NO_EVALUATION: Settings = {"EVAL_PROMPTS": "0", "EVAL_SAMPLES": "0"}
OFTEN = ", four updates a batch"

PARTS = (
    Part("equal_ways", runs_of("tiny", TINY, range(5), WAYS), {"staleness": off_policy.staleness}),
    Part("equal_ways_demo", runs_of("demo", DEMO_TASK, range(3), DEMO_WAYS), {"staleness": off_policy.staleness}),
    Part("staleness", STALENESS, {"break_even": off_policy.break_even, "multiple": off_policy.multiple}),
    Part(
        "replay",
        [
            *runs_of("tiny", TINY, range(5), variants(REPLAY | SHORTER)),
            *runs_of(
                "tiny, learning rate 2e-3", TINY | {"LEARNING_RATE": "2e-3"}, range(5), variants(REPLAY | SHORTER)
            ),
            *runs_of("demo", DEMO_TASK, range(3), variants(REPLAY)),
        ],
        {"costs": off_policy.costs},
    ),
    Part(
        "rounding",
        [
            *runs_of("clipped", TINY, range(5), variants(ENGINES)),
            *runs_of("GSPO", TINY | {"LOSS": "gspo"}, range(5), variants(ENGINES)),
        ],
    ),
    Part(
        "rounding_demo",
        [
            *runs_of("5e-6, 40 steps", DEMO_TASK | {"LEARNING_RATE": "5e-6", "MAX_STEPS": "40"}, range(5), PUBLISHED),
            *runs_of("1e-6, 100 steps", DEMO_TASK | {"LEARNING_RATE": "1e-6", "MAX_STEPS": "100"}, range(3), PUBLISHED),
        ],
    ),
    Part(
        "methods",
        [
            *methods.choosing(),
            *runs_of("tiny", TINY, range(5), UNTRAINED | variants(AT_BEST_RATES)),
            *runs_of("tiny" + OFTEN, TINY, range(5), variants(methods.four_updates(critic_rate="1e-3"))),
        ],
        {"choice": methods.choice, "by_tokens": methods.by_tokens},
    ),
    Part(
        "methods_demo",
        [
            *runs_of("demo", DEMO_TASK, range(3), UNTRAINED | variants(DEMO_METHODS)),
            *runs_of("demo" + OFTEN, DEMO_TASK, range(3), variants(methods.four_updates(critic_rate="1e-5"))),
        ],
        {"by_tokens": methods.by_tokens},
    ),
    Part(
        "distillation",
        [
            *runs_of("tiny", TAUGHT, range(5), distillation.variants(TEACHER) | distillation.baselined(TEACHER)),
            *runs_of("tiny", TAUGHT, range(5, 10), distillation.baselined(TEACHER)),
        ],
        BY_TEACHER,
    ),
    Part(
        "distillation_demo",
        runs_of("demo", DEMO_TASK, range(5), distillation.variants(DEMO_TASK | UNSEEN)),
        BY_TEACHER,
    ),
    Part("sft_first", runs_of("form", examples.RL_SETTINGS, range(5), examples.variants())),
    Part("expert_iteration", runs_of("demo", DEMO_TASK, range(5), examples.by_rounds())),
    Part(
        "components",
        [*by_component(LARGE, "0.1", equal="1"), *by_component(PERCENTAGE, "1", equal="0.01")],
        {"part_change": part_change, "part_after": part_after},
    ),
    Part(
        "tasks",
        [
            run
            for task, settings in TASKS.items()
            for run in runs_of(task, settings, range(3), variants({"GRPO": {}}, job_runs.train))
        ],
    ),
    Part("code", runs_of("one-line functions", FUNCTIONS, range(3), variants({"GRPO": {}}, job_runs.train))),
    Part(
        "episodes",
        [
            run
            for task, (settings, train) in EPISODES.items()
            for run in runs_of(task, settings, range(3), variants({"GRPO": {}}, train))
        ],
        {"below_random": below_random, "random_play": lambda _results: f"{random_play():.2f}"},
    ),
    Part(
        "mix",
        runs_of(mix.TASK, mix.MIX_SETTINGS | SHARED, range(3), mix.variants()),
        {"cost": mix.cost, "costs": mix.costs, "tokens": mix.tokens},
    ),
    Part(
        "beside_trl",
        [
            run
            for task, settings in {"tiny": TINY, "demo": DEMO_TASK}.items()
            for run in runs_of(
                task, settings | NO_EVALUATION, range(5), {OURS: ({}, in_process.train), TRL: ({}, train_trl)}
            )
        ],
        {"by_clock": by_clock, "seconds_to": seconds_to, "stages": stages},
    ),
    Part("gsm8k", runs_of("GSM8K", GSM8K, range(3), variants({"GRPO": {}}, train_gsm8k))),
)
"""The parts in the order of the page. The last part needs GSM8K, from the hub or as files."""
