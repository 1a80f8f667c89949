"""The experiments of docs/results.md: for each of them its tasks, variants and seeds.

A task is a set of environment variables; a variant changes some of them. `grpo run` makes every run, and
``trl_grpo.py`` those of TRL. Rows of docs/results/ whose variant is not in the table below were made by programs that
have been removed; the page says which.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from benchmarks.job import ROOT
from local_runner.spec import env_file
from services.protocol.accuracy import CORRECT
from trainer.algorithm.advantages import Outcomes, has_reward_variance

Settings = dict[str, str]
TRL = "TRL"


@dataclass(frozen=True)
class Way:
    """A variant of a task: the settings that it changes, and how its run is started."""

    settings: Settings = field(default_factory=dict)
    job_group: str = "jobgroup.yaml"
    nodes: Mapping[str, int] = field(default_factory=dict)
    """Numbers of nodes other than one a task."""
    killed_after: int = 0
    """The step after which the trainer is killed once; 0: never."""
    begins_with: tuple[str, Settings, str] | None = None
    """Job group and settings of a run before this one, and the variable that names the model of that run."""


@dataclass(frozen=True)
class Run:
    """A run of an experiment."""

    task: str
    variant: str
    seed: int
    settings: Settings
    way: Way


def runs(task: str, settings: Settings, seeds: Iterable[int], ways: Mapping[str, Way | Settings]) -> list[Run]:
    """Return the runs of a task seed by seed, so that an interruption leaves all variants with the same seeds."""
    made = {name: way if isinstance(way, Way) else Way(way) for name, way in ways.items()}
    return [
        Run(task, name, seed, {**settings, **way.settings, "SEED": str(seed), "DATA_SEED": str(seed)}, way)
        for seed in seeds
        for name, way in made.items()
    ]


# --- tasks ------------------------------------------------------------------------------------------------------------

EXACT = {"COMPUTE_TYPE": "float32", "KEEP_MEMORY": "true", "MIN_WORKERS": "1", "OMP_NUM_THREADS": "1"}
"""Runs on one thread in float32 give the same numbers wherever they run."""
DEMO = env_file(ROOT / "examples/demo.env") | EXACT | {"NUM_EPOCHS": "1000", "EVAL_SAMPLES": "4"}
"""SmolLM2-135M, with the settings of examples/demo.env: it learns to answer an addition by the number alone."""
PARITY = "benchmarks.results.parity:parity"
TINY = EXACT | {
    "DATASET": "arithmetic",
    "DATASET_CONFIG": '{"digits": [1, 2], "operations": "+-", "template": "{a}{op}{b}="}',
    "PROMPT_STYLE": "plain",
    "REWARD_FN": PARITY,
    "ROLLOUT_ENGINE": "embedded",
    "CUDA_VISIBLE_DEVICES": "",
    "BATCH_SIZE": "8",
    "GROUP_SIZE": "8",
    "MAX_NEW_TOKENS": "8",
    "TEMPERATURE": "1",
    "LEARNING_RATE": "5e-4",
    "MAX_STEPS": "40",
    "NUM_EPOCHS": "1000",
    "CHECKPOINT_EVERY": "0",
    "ENGINE_DTYPE": "float32",
    "PUBLISH_TYPE": "float32",
    "EVAL_PROMPTS": "200",
    "EVAL_SAMPLES": "4",
}
"""A model of 0.4M random weights learns to answer sums with eight even digits and differences with eight odd ones.

No MODEL_NAME: the run makes the model, always the same.
"""
BFLOAT16: Settings = dict.fromkeys(("COMPUTE_TYPE", "PUBLISH_TYPE", "ENGINE_DTYPE"), "bfloat16")
GREEDY = DEMO | {"EVAL_SAMPLES": "0", "EVAL_PROMPTS": "52"}


def at(rate: str, task: Settings = TINY) -> Settings:
    """Return a task with another learning rate."""
    return {**task, "LEARNING_RATE": rate}


# --- equal ways, staleness, replay, rounding --------------------------------------------------------------------------


def asynchronous(staleness: int, settings: Settings | None = None) -> Way:
    """Return an asynchronous run whose groups are at most ``staleness`` policy versions old."""
    return Way({"MODE": "async", "MAX_STALENESS": str(staleness), **(settings or {})}, "jobgroups/async.yaml")


def ways(checkpoint_every: int, killed_after: int) -> dict[str, Way]:
    """Return ways to train a task that give the same weights, and one that computes in bfloat16."""
    return {
        "synchronous": Way(),
        "killed and resumed": Way({"CHECKPOINT_EVERY": str(checkpoint_every)}, killed_after=killed_after),
        "broadcast": Way({"PUBLISH_TRANSPORT": "broadcast"}),
        "two ranks": Way(nodes={"ppo-trainer": 2}),
        "bfloat16": Way(BFLOAT16),
        "asynchronous, staleness 1": asynchronous(1),
    }


TINY_WAYS = ways(8, 20) | {f"asynchronous, staleness {bound}": asynchronous(bound) for bound in (2, 4)}
TINY_WAYS |= {"four ranks": Way(nodes={"ppo-trainer": 4})}
WAVES = {"TRAIN_WHILE_GENERATING": "true"}
TINY_WAYS |= {
    "training while groups arrive": Way(WAVES),
    "the same, killed and resumed": Way(WAVES | {"CHECKPOINT_EVERY": "8"}, killed_after=20),
}
LAUNCHED = {name: TINY_WAYS[name] for name in ("synchronous", "asynchronous, staleness 1")}
"""The two modes between which ``grpo launch`` chooses."""
DEMO_WAYS = ways(2, 5) | {"LoRA": Way({"LORA_RANK": "8", "LEARNING_RATE": "2e-4"})}

AROUND_SAMPLER = {"IMPORTANCE_CORRECTION": "none"}
CORRECTIONS: dict[str, Settings] = {
    "": {},
    ", clipped around the policy that sampled": AROUND_SAMPLER,
    ", CISPO": {"LOSS": "cispo"},
    ", IcePop": {"IMPORTANCE_CORRECTION": "icepop"},
    **{f", weights up to {cap}": {"IMPORTANCE_CAP": cap} for cap in ("1", "3", "5")},
    **{f", KL up to {bound}": {"OFF_POLICY_MAX_KL": bound} for bound in ("0.1", "0.5")},
}
RISING = ("5e-4", "2e-3", "4e-3")
STALE = {f"staleness 4{name}": asynchronous(4, settings) for name, settings in CORRECTIONS.items()}

REPLAY: dict[str, Settings] = {"no replay": {}} | {
    f"{groups} groups, KL to {bound}": {"REPLAY_GROUPS": groups, "REPLAY_MAX_KL": bound}
    for groups in ("4", "8")
    for bound in ("0.1", "1")
}
SHORTER = {
    f"{groups} groups, KL to 1, {steps} steps": {"REPLAY_GROUPS": groups, "REPLAY_MAX_KL": "1", "MAX_STEPS": steps}
    for groups, steps in (("4", "31"), ("8", "26"))
}
"""Steps of the tiny task that take the processor time of its 40 without replay."""


def batches(completions: int) -> dict[str, Settings]:
    """Return the prompts x completions of a step, and as many steps as have ``completions`` in all."""
    return {
        f"{prompts} x {group}": {
            "BATCH_SIZE": f"{prompts}",
            "GROUP_SIZE": f"{group}",
            "MAX_STEPS": f"{completions // (prompts * group)}",
        }
        for prompts, group in ((8, 8), (4, 8), (32, 8), (8, 16))
    }


# --- methods ----------------------------------------------------------------------------------------------------------


def ppo(rate: str) -> Settings:
    """Return PPO with the critic's learning rate."""
    return {"ADVANTAGE": "gae", "CRITIC_LEARNING_RATE": rate}


METHODS: dict[str, Settings] = {
    "GRPO": {},
    "Dr. GRPO": {"ADVANTAGE": "dr_grpo", "AGGREGATION": "constant_length"},
    "RLOO": {"ADVANTAGE": "rloo"},
    "REINFORCE++": {"ADVANTAGE": "reinforce"},
    "PPO": ppo("1e-3"),
    "sequence mean": {"AGGREGATION": "sequence_mean"},
    "dynamic sampling": {"DYNAMIC_SAMPLING_TRIES": "2"},
    "SFT on right answers": {"ADVANTAGE": "benchmarks.results.experiments:right_answers"},
    "SFT on the group's best": {"ADVANTAGE": "benchmarks.results.experiments:best_of_group"},
}
"""Methods that differ with a single update a batch; GRPO has the product's defaults."""
RATES = ("4e-3", "2e-3", "4e-3", "2e-3", "2e-3", "2e-3", "2e-3", "1e-3", "4e-3")
"""The best learning rate of each method on the tiny task, by its mean reward on the seeds 100 and 101."""
AT_BEST = {name: at(rate, own) for (name, own), rate in zip(METHODS.items(), RATES, strict=True)}
TRIED = {f"{name} at {rate}": at(rate, own) for name, own in METHODS.items() for rate in ("1e-3", "2e-3", "4e-3")}
OF_DEMO = METHODS | {"PPO": ppo("1e-5"), "overlong penalty": {"OVERLONG_BUFFER": "4"}}


def four_updates(critic_rate: str) -> dict[str, Settings]:
    """Return the methods that differ in the ratio to the policy at the start of the step, 1 in the first update."""
    own = {"GRPO": {}, "clip-higher": {"CLIP_HIGH": "0.28"}, "GSPO": {"LOSS": "gspo"}, "CISPO": {"LOSS": "cispo"}}
    own |= {"PPO": ppo(critic_rate)}
    return {name: {"UPDATES_PER_BATCH": "4"} | settings for name, settings in own.items()}


# --- teachers, examples ----------------------------------------------------------------------------------------------


def taught(task: Settings, **teacher: str) -> dict[str, Way]:
    """Return GRPO and distillation; a run of the seed 1001 with ``teacher``'s settings makes the teacher's model."""
    first = {**task, **teacher, "SEED": "1001", "DATA_SEED": "1001"}
    unrewarded = {"REWARD_WEIGHT": "0", "EVAL_EVERY": "2"}
    one = unrewarded | {"GROUP_SIZE": "1"}
    by_teacher = {
        "distillation, 8 x 8": unrewarded,
        "distillation, 8 x 1": one,
        "distillation, 8 x 1, whole vocabulary": one | {"TEACHER_JSD_BETA": "1"},
    }
    return {
        "GRPO, 8 x 8": Way({"EVAL_EVERY": "2"}),
        "GRPO, 2 x 4": Way({"EVAL_EVERY": "2", "BATCH_SIZE": "2", "GROUP_SIZE": "4"}),
    } | {name: Way(own, begins_with=("jobgroup.yaml", first, "TEACHER_MODEL")) for name, own in by_teacher.items()}


FORM = DEMO | env_file(ROOT / "examples/demo-sft-rl.env") | {"MODEL_NAME": DEMO["MODEL_NAME"]}
EXAMPLES = env_file(ROOT / "examples/demo-sft.env") | {"COMPUTE_TYPE": "float32", "OMP_NUM_THREADS": "1"}


# --- tasks of one completion and of several turns ---------------------------------------------------------------------


def generator(name: str, tokens: int, **parameters: int) -> Settings:
    """Return the task of a generator of reasoning-gym, asked level by level in one epoch."""
    return GREEDY | {
        "DATASET": f"reasoning_gym:{name}",
        "DATASET_CONFIG": json.dumps({"size": 240, "levels": [0, 1], name: parameters}),
        "DATASET_HELD_OUT": "0.4",
        "PROMPT_STYLE": "few_shot",
        "CURRICULUM": "source",
        "INSTRUCTION": "none",
        "REWARD_FN": "reasoning_gym",
        "MAX_NEW_TOKENS": str(tokens),
        "MICRO_BATCH_TOKENS": "2048",
        "NUM_EPOCHS": "1",
        "MAX_STEPS": "16",
        "EVAL_PROMPTS": "72",
    }


TASKS: dict[str, Settings] = {
    "addition": GREEDY,
    "chain_sum": generator("chain_sum", 12, min_digits=1, max_digits=1),
    "spell_backward": generator("spell_backward", 14),
    "gcd": generator("gcd", 12, min_value=1, max_value=12),
    "letter_counting": generator("letter_counting", 12),
    "countdown": generator(
        "countdown", 16, min_numbers=2, max_numbers=2, min_value=1, max_value=9, min_target=2, max_target=18
    ),
}
CODE = GREEDY | env_file(ROOT / "examples/demo-code.env")
AGENT = env_file(ROOT / "examples/demo-agent.env") | EXACT | {"ROLLOUT": "agent"}
GAME = env_file(ROOT / "examples/demo-environment.env") | EXACT | {"ROLLOUT": "environment"}
NIM = GAME | {"ENVIRONMENT": "nim", "AGENT_MAX_TURNS": "16", "AGENT_MAX_TOKENS": "64"}
BY_GAME = "jobgroups/environment.yaml"
GSM8K = DEMO | {
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

# --- speed ------------------------------------------------------------------------------------------------------------

UNEVALUATED = {"EVAL_PROMPTS": "0", "EVAL_SAMPLES": "0"}
BESIDE_TRL: dict[str, Settings] = {"this project": {}, TRL: {}}
QUICK = DEMO | UNEVALUATED | {"OMP_NUM_THREADS": "", "LEARNING_RATE": "1e-5", "MAX_NEW_TOKENS": "12", "MAX_STEPS": "4"}
"""A few steps on all cores; an empty variable counts as unset."""
TRANSPORTS = {
    f"{size}, {transport}": Way({**model, "PUBLISH_TRANSPORT": transport}, nodes={"rollout-server": 2})
    for size, model in {"tiny": {"MODEL_NAME": ""}, "135m": {}}.items()
    for transport in ("disk", "broadcast", "local")
}

# --- rejection sampling as advantages ---------------------------------------------------------------------------------

# With one update a batch the loss of a token is -log pi on the chosen completions, and 0 on the others: cross entropy
# on the policy's own right answers, without a group's baseline. The trainer loads these functions by name.


def right_answers(outcomes: Outcomes) -> Tensor:
    """Return 1 for right answers and 0 for the others (STaR, arXiv:2203.14465, without its rationales)."""
    return (outcomes.rewards >= CORRECT).double()


def best_of_group(outcomes: Outcomes) -> Tensor:
    """Return 1 for the answers with the highest reward of a group whose rewards differ, else 0 (arXiv:2304.06767)."""
    rewards, ids = outcomes.rewards, outcomes.group_ids
    best = (rewards[None, :].where(ids[None, :] == ids[:, None], -float("inf"))).amax(1)
    return ((rewards == best) & has_reward_variance(rewards, ids)).double()


# --- the table --------------------------------------------------------------------------------------------------------

EXPERIMENTS: Mapping[str, list[Run]] = {
    "equal_ways": [*runs("tiny", TINY, range(5), TINY_WAYS), *runs("tiny", TINY, range(5, 10), LAUNCHED)],
    "equal_ways_demo": runs("demo", DEMO, range(3), DEMO_WAYS),
    "staleness": [run for rate in RISING for run in runs(f"learning rate {rate}", at(rate), range(5), STALE)],
    "replay": [
        *runs("tiny", TINY, range(5), REPLAY | SHORTER),
        *runs("tiny, learning rate 2e-3", at("2e-3"), range(5), REPLAY | SHORTER),
        *runs("demo", DEMO, range(3), REPLAY),
    ],
    "batch": [
        *(run for rate in RISING[:2] for run in runs(f"learning rate {rate}", at(rate), range(5), batches(2560))),
        *runs("demo", DEMO, range(5), batches(1280)),
    ],
    "methods": [
        *runs("tiny, choice of rates", TINY, range(100, 102), TRIED),
        *runs("tiny", TINY, range(5), AT_BEST),
        *runs("tiny, four updates a batch", TINY, range(5), four_updates("1e-3")),
    ],
    "methods_demo": [
        *runs("demo", DEMO, range(3), OF_DEMO),
        *runs("demo, four updates a batch", DEMO, range(3), four_updates("1e-5")),
    ],
    "distillation": runs(
        "tiny", at("1e-3"), range(5), taught(TINY, LEARNING_RATE="2e-3", MAX_STEPS="60", TEACHER_MODEL="")
    ),
    "distillation_demo": runs("demo", DEMO, range(5), taught(DEMO)),
    "sft_first": runs(
        "form",
        FORM,
        range(5),
        {"RL alone": {}, "SFT, then RL": Way(begins_with=("jobgroups/sft.yaml", EXAMPLES, "MODEL_NAME"))},
    ),
    "tasks": [run for task, settings in TASKS.items() for run in runs(task, settings, range(3), {"GRPO": {}})],
    "code": runs("one-line functions", CODE, range(3), {"GRPO": {}}),
    "episodes": [
        *runs("tool agent", AGENT, range(3), {"GRPO": Way(job_group="jobgroups/agent.yaml")}),
        *runs("guessing game", GAME, range(3), {"GRPO": Way(job_group=BY_GAME)}),
        *runs("Nim against itself", NIM, range(3), {"GRPO": Way(job_group=BY_GAME)}),
    ],
    "beside_trl": [
        *runs("tiny", TINY | UNEVALUATED, range(5), BESIDE_TRL),
        *runs("demo", DEMO | UNEVALUATED, range(5), BESIDE_TRL),
    ],
    "gsm8k": runs("GSM8K", GSM8K, range(3), {"GRPO": {}}),
    "step": [
        *runs("float32", QUICK, range(2), BESIDE_TRL),
        *runs("bfloat16", QUICK | BFLOAT16, range(2), BESIDE_TRL),
    ],
    "publication": runs("two rollout nodes", QUICK | {"MAX_NEW_TOKENS": "4"}, range(1), TRANSPORTS),
}
"""The runs of each experiment, in the order in which they are made."""
