"""Tasks that a model of 135M parameters learns or not: of one completion, of several turns, and GSM8K."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from benchmarks.harness import ROOT
from benchmarks.job import Job
from benchmarks.results import job_runs
from benchmarks.results.comparisons import paragraph, table
from benchmarks.results.job_runs import AFTER, Figures
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, Run, Settings
from benchmarks.results.tasks import DEMO_TASK, seeded
from evaluation.metrics import GREEDY as GREEDY_ACCURACY
from local_runner.spec import env_file
from services.core.errors import ConfigurationError
from services.environment_server.games import draw_heaps, is_optimal

TASK_SEEDS = range(3)
TASK_VARIANT = "GRPO"
STEPS = 16
QUESTIONS = 240
"""Questions of a generator, of which 16 steps train on 128."""
HELD_OUT = 72

SHARED = DEMO_TASK | {"EVAL_SAMPLES": "0", "EVAL_PROMPTS": "52"}


def generator(name: str, tokens: int, **parameters: int) -> Settings:
    """Return the settings of a generator of reasoning-gym, asked level by level in one epoch.

    Args:
        name: the generator.
        tokens: MAX_NEW_TOKENS.
        parameters: replace those of both levels.
    """
    return SHARED | {
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
        "MAX_STEPS": str(STEPS),
        "EVAL_PROMPTS": str(HELD_OUT),
    }


TASK_TASKS: dict[str, tuple[Settings, str]] = {
    "addition": (SHARED, "one-digit sums, as `make demo`"),
    "chain_sum": (
        generator("chain_sum", 12, min_digits=1, max_digits=1),
        "sums and differences of two digits, then of two or three",
    ),
    "spell_backward": (generator("spell_backward", 14), "words of three letters written backwards, then of up to five"),
    "gcd": (
        generator("gcd", 12, min_value=1, max_value=12),
        "greatest common divisors of two numbers up to 12, then of two or three",
    ),
    "letter_counting": (
        generator("letter_counting", 12),
        "occurrences of a letter in five words, then in up to seven",
    ),
    "countdown": (
        generator("countdown", 16, min_numbers=2, max_numbers=2, min_value=1, max_value=9, min_target=2, max_target=18),
        "an expression of two digits with a given value",
    ),
}

TASK_RUNS = [
    Run(task, TASK_VARIANT, seed, seeded(settings, seed), job_runs.train_with_figures)
    for seed in TASK_SEEDS
    for task, (settings, _) in TASK_TASKS.items()
]


def tasks_show(results: Results) -> str:
    """Return the section: table and curves."""
    text = f"""
    SmolLM2-135M in the whole job group, {SHARED["BATCH_SIZE"]} prompts a step with {SHARED["GROUP_SIZE"]} completions,
    the learning rate and all else as in `examples/demo.env` for every task: nothing is tuned by task. The generators of
    reasoning-gym have {QUESTIONS} questions, asked after four solved examples, and score answers themselves, some with
    parts of a point, so that a reward above 0 need not be a right answer. The questions come once, the easier level
    first (`CURRICULUM=source`), so the reward of later steps is that of harder questions. Accuracy is the share of
    right answers among one greedy answer to each of n held-out questions of all levels, before and after. These levels
    replaced harder ones that were asked without examples, when those had been seen: of the five generators, all but
    chain_sum had given no answer a reward at the first step, and none had learned.
    """
    plots = [
        curves(f"tasks-{task}", results, task, task) for task in TASK_TASKS if any(r.task == task for r in results)
    ]
    table = job_runs.task_table(results, {task: text for task, (_, text) in TASK_TASKS.items()})
    return "\n\n".join([paragraph(text), table, *plots])


def tasks_summary(results: Results) -> list[str]:
    """Return the sentences of the summary."""
    return job_runs.sentences(results, "[Tasks](#tasks-of-one-completion)")


TASK_PART = Part("tasks", "Tasks of one completion", TASK_RUNS, tasks_show, tasks_summary)


EPISODE_SEEDS = range(3)
AGENT_SETTINGS = env_file(ROOT / "examples/demo-agent.env")
ENVIRONMENT_SETTINGS = env_file(ROOT / "examples/demo-environment.env")
WITHOUT_TOKENS = 64
"""Longest answer without the tool: room to reason before it."""
EPISODE_VARIANT = "GRPO"
EPISODE_SHARED: Settings = {"COMPUTE_TYPE": "float32", "MIN_WORKERS": "1", "KEEP_MEMORY": "true"}
PLAYED = ENVIRONMENT_SETTINGS | EPISODE_SHARED | {"ROLLOUT": "environment"}

AGENT, ENVIRONMENT, SELF_PLAY = "tool agent", "guessing game", "Nim against itself"
LEGAL, OPTIMAL = "environment_legal_moves", "environment_optimal_moves"
GREEDY = "eval_"
"""The beginning of the names of figures of greedy games on held-out deals, which only the last step has."""
CALLS, PARSED = "tool_calls_mean", "tool_calls_parsed"


def train_agent(run: Run) -> Result:
    """Run the agent's job group, and evaluate the trained model without agent and tool, too."""
    return job_runs.train_with_figures(
        run, job_group=ROOT / "jobgroups/agent.yaml", columns=(CALLS, PARSED), more=without_tool
    )


def without_tool(job: Job) -> Figures:
    """Return the trained model's greedy accuracy on the held-out questions, each answered without the tool."""
    with TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "scripts.grpo", "evaluate", "--model", str(job.run_dir / "model")]
        command += ["--workflow", "single-turn", "--limit", AGENT_SETTINGS["EVAL_PROMPTS"], "--output", directory]
        command += ["--env-file", "examples/demo-agent.env", "--max-new-tokens", str(WITHOUT_TOKENS)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{done.stdout[-3000:]}\nerror: the evaluation ended with {done.returncode}")
        [results] = Path(directory).rglob("results.json")
        return {f"without_tool{AFTER}": orjson.loads(results.read_bytes())["metrics"][GREEDY_ACCURACY]["value"]}


train_environment = partial(
    job_runs.train_with_figures,
    job_group=ROOT / "jobgroups/environment.yaml",
    nodes={"environment-server": 1},
    columns=(LEGAL, OPTIMAL),
    more=lambda job: job_runs.of_last_step(job, [GREEDY + LEGAL, GREEDY + OPTIMAL]),
)
NIM = {"ENVIRONMENT": "nim", "AGENT_MAX_TURNS": "16", "AGENT_MAX_TOKENS": "64"}
BY_TASK = {
    AGENT: Run(AGENT, EPISODE_VARIANT, 0, AGENT_SETTINGS | EPISODE_SHARED | {"ROLLOUT": "agent"}, train_agent),
    ENVIRONMENT: Run(ENVIRONMENT, EPISODE_VARIANT, 0, PLAYED, train_environment),
    SELF_PLAY: Run(SELF_PLAY, EPISODE_VARIANT, 0, PLAYED | NIM, train_environment),
}
RANDOM_GAMES = 5_000


@cache
def random_play() -> float:
    """Return the share of optimal moves of random legal ones, as the figure is taken: by seat and game, over games."""
    rng, shares = random.Random(0), []
    for seed in range(RANDOM_GAMES):
        heaps, seat = draw_heaps(seed), 0
        optimal: list[list[bool]] = [[], []]
        while any(heaps):
            heap, stones = rng.choice([(i, n) for i, size in enumerate(heaps) for n in range(1, size + 1)])
            if (is_right := is_optimal(heaps, heap, stones)) is not None:
                optimal[seat].append(is_right)
            heaps[heap] -= stones
            seat = 1 - seat
        shares += [statistics.fmean(moves) for moves in optimal if moves]
    return statistics.fmean(shares)


EPISODE_RUNS = [
    replace(run, seed=seed, settings=seeded(run.settings, seed)) for seed in EPISODE_SEEDS for run in BY_TASK.values()
]


def episodes_show(results: Results) -> str:
    """Return the section: table, figures of the three tasks, and curves."""
    text = f"""
    SmolLM2-135M with the settings of `examples/demo-agent.env` and `examples/demo-environment.env`. The tool agent
    answers products of two numbers of two digits, which the model cannot compute; "without the tool" is the trained
    model's greedy accuracy when it gets the question alone. The guessing game has numbers from 1 to 7 and three
    guesses, which good play always wins. In Nim the model
    plays both seats, so its rewards cancel and its accuracy says nothing. What counts is the share of legal moves and,
    among legal moves where one wins, the share that the exact solution plays (Bouton's theorem). In {RANDOM_GAMES:,}
    games of moves drawn at random among the legal ones it is {random_play():.2f}.
    """
    texts = {AGENT: "products, by a tool", ENVIRONMENT: "a number by three guesses", SELF_PLAY: "two or three heaps"}
    shown = [
        ("tool calls an episode, in training", AGENT, CALLS),
        ("accuracy without the tool", AGENT, "without_tool"),
        ("legal moves, in training", SELF_PLAY, LEGAL),
        ("optimal moves, in training", SELF_PLAY, OPTIMAL),
        ("legal moves, greedy", SELF_PLAY, GREEDY + LEGAL),
        ("optimal moves, greedy", SELF_PLAY, GREEDY + OPTIMAL),
    ]
    rows = [(name, task, *job_runs.before_and_after(results, figure)) for name, task, figure in shown]
    plots = [
        curves(f"episodes-{number}", results, task, task)
        for number, task in enumerate((AGENT, ENVIRONMENT))
        if any(result.task == task for result in results)
    ]
    figures = table(("figure", "task", "first step", "last step, or after"), [row for row in rows if row[-1]])
    return "\n\n".join([paragraph(text), job_runs.task_table(results, texts), figures, *plots])


def episodes_summary(results: Results) -> list[str]:
    """Return the sentences of the summary."""
    link = "[Tasks of several turns](#tasks-of-several-turns)"
    played = [result for result in results if result.task == SELF_PLAY]
    legal, optimal = (job_runs.before_and_after(played, figure) for figure in (LEGAL, OPTIMAL))
    last = [result.figures[OPTIMAL + AFTER] for result in played if OPTIMAL + AFTER in result.figures]
    chance = random_play()
    place = f"in {sum(figure < chance for figure in last)} of {len(last)} seeds **below** that"
    moves = (
        f"{link}, self-play of Nim, moves in training: legal {' to '.join(legal)}, optimal {' to '.join(optimal)}, "
        f"{place} of random legal moves ({chance:.2f})."
    )
    return [
        *job_runs.sentences([result for result in results if result.task != SELF_PLAY], link),
        *([moves] if played else []),
    ]


EPISODE_PART = Part("episodes", "Tasks of several turns", EPISODE_RUNS, episodes_show, episodes_summary)


GSM8K_SEEDS = range(3)
GSM8K = "GSM8K"
DIRECTORY = "GSM8K_DIR"
"""The environment variable that names a directory with train.jsonl and test.jsonl, in place of the hub."""

GSM8K_SETTINGS = DEMO_TASK | {
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
GSM8K_COLUMNS = ("reward_part_format", "reward_part_math", "truncation_rate")


def train_gsm8k(run: Run) -> Result:
    """Run the job group on the hub's GSM8K, or on the files of GSM8K_DIR.

    Raises:
        ConfigurationError: GSM8K_DIR lacks a file.
    """
    directory = os.environ.get(DIRECTORY)
    own = run
    if directory:
        files = {"DATASET": Path(directory) / "train.jsonl", "DATASET_TEST": Path(directory) / "test.jsonl"}
        for file in files.values():
            if not file.is_file():
                raise ConfigurationError(f"{DIRECTORY}: there is no {file}; give a directory with GSM8K's two files")
        own = replace(run, settings=run.settings | {name: str(file.resolve()) for name, file in files.items()})
    result = job_runs.train_with_figures(own, columns=GSM8K_COLUMNS)
    result.settings = dict(run.settings)
    return result


GSM8K_RUNS = [Run(GSM8K, "GRPO", seed, seeded(GSM8K_SETTINGS, seed), train_gsm8k) for seed in GSM8K_SEEDS]


def gsm8k_show(results: Results) -> str:
    """Return the section: table, parts of the reward, and curve."""
    text = f"""
    The published questions after four solved examples, SmolLM2-135M, and answers of at most
    {GSM8K_SETTINGS["MAX_NEW_TOKENS"]} tokens. The reward is 1 for a right answer and 0.2 for its form, which is a final
    answer behind "####" or in a box. The run was to have 16 steps and was cut to {GSM8K_SETTINGS["MAX_STEPS"]} for its
    cost, after the first two had been seen. Without examples, one of the first 32 answers had that form, too few to
    learn from. So small a model seldom solves a question: look at the form, and at the accuracy with its error, which
    is that of one greedy answer to each of {GSM8K_SETTINGS["EVAL_PROMPTS"]} test questions. `{DIRECTORY}=DIRECTORY`
    takes train.jsonl and test.jsonl from a directory instead of from the hub.
    """
    names = {
        "share of answers in form": GSM8K_COLUMNS[0],
        "share of right answers": GSM8K_COLUMNS[1],
        "cut off": GSM8K_COLUMNS[2],
    }
    parts = [(name, *job_runs.before_and_after(results, column)) for name, column in names.items()]
    return "\n\n".join(
        [
            paragraph(text),
            job_runs.task_table(results, {GSM8K: "word problems"}),
            table(("in training", "first step", "last step"), parts),
            curves("gsm8k", results, GSM8K, "GSM8K, reward of form and answer"),
        ]
    )


def gsm8k_summary(results: Results) -> list[str]:
    """Return the sentences of the summary."""
    form = " to ".join(job_runs.before_and_after(results, GSM8K_COLUMNS[0]))
    return [
        f"[GSM8K](#gsm8k-with-135m-parameters): share of training answers in the form asked for {form}.",
        *job_runs.sentences(results, "[GSM8K](#gsm8k-with-135m-parameters)"),
    ]


GSM8K_PART = Part("gsm8k", "GSM8K with 135M parameters", GSM8K_RUNS, gsm8k_show, gsm8k_summary)
