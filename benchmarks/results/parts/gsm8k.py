"""GSM8K as far as a model of 135M parameters goes: it learns the form of an answer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from benchmarks.results import job_figures
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, Run
from benchmarks.results.tables import paragraph, table
from benchmarks.results.tasks import DEMO_TASK, seeded
from services.core.errors import ConfigurationError

SEEDS = range(3)
TASK = "GSM8K"
DIRECTORY = "GSM8K_DIR"
"""The environment variable that names a directory with train.jsonl and test.jsonl, in place of the hub."""

SETTINGS = DEMO_TASK | {
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
COLUMNS = ("reward_part_format", "reward_part_math", "truncation_rate")


def train(run: Run) -> Result:
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
    result = job_figures.train(own, columns=COLUMNS)
    result.settings = dict(run.settings)
    return result


RUNS = [Run(TASK, "GRPO", seed, seeded(SETTINGS, seed), train) for seed in SEEDS]


def show(results: Results) -> str:
    """Return the section: table, parts of the reward, and curve."""
    text = f"""
    The published questions after four solved examples, SmolLM2-135M, and answers of at most
    {SETTINGS["MAX_NEW_TOKENS"]} tokens. The reward is 1 for a right answer and 0.2 for its form, which is a final
    answer behind "####" or in a box. The run was to have 16 steps and was cut to {SETTINGS["MAX_STEPS"]} for its
    cost, after the first two had been seen. Without examples, one of the first 32 answers had that form, too few to
    learn from. So small a model seldom solves a question: look at the form, and at the accuracy with its error, which
    is that of one greedy answer to each of {SETTINGS["EVAL_PROMPTS"]} test questions. `{DIRECTORY}=DIRECTORY` takes
    train.jsonl and test.jsonl from a directory instead of from the hub.
    """
    names = {"share of answers in form": COLUMNS[0], "share of right answers": COLUMNS[1], "cut off": COLUMNS[2]}
    parts = [(name, *job_figures.before_and_after(results, column)) for name, column in names.items()]
    return "\n\n".join(
        [
            paragraph(text),
            job_figures.task_table(results, {TASK: "word problems"}),
            table(("in training", "first step", "last step"), parts),
            curves("gsm8k", results, TASK, "GSM8K, reward of form and answer"),
        ]
    )


def summary(results: Results) -> list[str]:
    """Return the sentences of the summary."""
    form = " to ".join(job_figures.before_and_after(results, COLUMNS[0]))
    return [
        f"[GSM8K](#gsm8k-with-135m-parameters): share of training answers in the form asked for {form}.",
        *job_figures.sentences(results, "[GSM8K](#gsm8k-with-135m-parameters)"),
    ]


PART = Part("gsm8k", "GSM8K with 135M parameters", RUNS, show, summary)
