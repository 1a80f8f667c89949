"""Tasks of one completion: additions and generators of reasoning-gym, whose levels come in order."""

from __future__ import annotations

from benchmarks.results import job_figures
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Results, Run, Settings
from benchmarks.results.tables import paragraph
from benchmarks.results.tasks import DEMO_TASK, seeded

SEEDS = range(3)
VARIANT = "GRPO"
STEPS = 16
QUESTIONS = 180
"""Questions of a generator, of which 16 steps train on 128 and 52 are held out."""

SHARED = DEMO_TASK | {"EVAL_SAMPLES": "0", "EVAL_PROMPTS": "52"}


def generator(name: str, tokens: int, levels: str) -> Settings:
    """Return the settings of a generator of reasoning-gym, asked level by level in one epoch."""
    return SHARED | {
        "DATASET": f"reasoning_gym:{name}",
        "DATASET_CONFIG": f'{{"size": {QUESTIONS}, "levels": [{levels}]}}',
        "DATASET_HELD_OUT": "0.29",
        "CURRICULUM": "source",
        "INSTRUCTION": "none",
        "REWARD_FN": "reasoning_gym",
        "MAX_NEW_TOKENS": str(tokens),
        "NUM_EPOCHS": "1",
        "MAX_STEPS": str(STEPS),
    }


TASKS: dict[str, tuple[Settings, str]] = {
    "addition": (SHARED, "one-digit sums, as `make demo`"),
    "chain_sum": (generator("chain_sum", 8, "0, 1"), "sums of two to four numbers"),
    "spell_backward": (generator("spell_backward", 12, "0, 1"), "words written backwards"),
    "gcd": (generator("gcd", 8, "0, 1"), "greatest common divisors"),
    "letter_counting": (generator("letter_counting", 8, "0, 1"), "occurrences of a letter in a text"),
    "countdown": (generator("countdown", 24, "0, 1"), "an expression of given numbers with a given value"),
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
    the learning rate and all else as in `demo.env` for every task: nothing is tuned by task. The generators of
    reasoning-gym have {QUESTIONS} questions and score answers themselves, some with parts of a point, so that a reward
    above 0 need not be a right answer. The questions come once, the easier level first (`CURRICULUM=source`), so the
    reward of later steps is that of harder questions. Accuracy is the share of right answers
    among one greedy answer to each of n held-out questions of all levels, before and after. {harder_level(results)}
    """
    plots = [curves(f"tasks-{task}", results, task, task) for task in TASKS if any(r.task == task for r in results)]
    table = job_figures.task_table(results, {task: text for task, (_, text) in TASKS.items()})
    return "\n\n".join([paragraph(text), table, *plots])


def harder_level(results: Results) -> str:
    """Return what chain_sum's reward does when the questions get harder, in the first seed; "" without it."""
    [*own] = [result.rewards for result in results if result.task == "chain_sum" and result.seed == SEEDS[0]]
    if not own:
        return ""
    half = len(own[0]) // 2
    return (
        f"With seed {SEEDS[0]}, chain_sum's reward rises to {max(own[0][:half]):.2f} on the easier level, which the "
        f"first half of the steps asks, and is {max(own[0][half + 1 :]):.2f} at most on the harder one."
    )


def summary(results: Results) -> list[str]:
    """Return the sentences of the summary."""
    return job_figures.sentences(results, "[Tasks](#tasks-of-one-completion)")


PART = Part("tasks", "Tasks of one completion", RUNS, show, summary)
