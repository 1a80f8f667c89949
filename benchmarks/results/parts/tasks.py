"""Tasks of one completion: additions and generators of reasoning-gym, whose levels come in order."""

from __future__ import annotations

import json

from benchmarks.results import job_figures
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Results, Run, Settings
from benchmarks.results.tables import paragraph
from benchmarks.results.tasks import DEMO_TASK, seeded

SEEDS = range(3)
VARIANT = "GRPO"
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


TASKS: dict[str, tuple[Settings, str]] = {
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

RUNS = [
    Run(task, VARIANT, seed, seeded(settings, seed), job_figures.train)
    for seed in SEEDS
    for task, (settings, _) in TASKS.items()
]


def show(results: Results) -> str:
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
    plots = [curves(f"tasks-{task}", results, task, task) for task in TASKS if any(r.task == task for r in results)]
    table = job_figures.task_table(results, {task: text for task, (_, text) in TASKS.items()})
    return "\n\n".join([paragraph(text), table, *plots])


def summary(results: Results) -> list[str]:
    """Return the sentences of the summary."""
    return job_figures.sentences(results, "[Tasks](#tasks-of-one-completion)")


PART = Part("tasks", "Tasks of one completion", RUNS, show, summary)
