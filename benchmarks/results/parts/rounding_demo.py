"""Learning with published weights that are rounded: the demo's task from a bfloat16 base at small rates."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.results import in_process
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, Run, Settings, by_variant
from benchmarks.results.tables import accuracy_note, anchor, comparison, paragraph, ranking
from benchmarks.results.tasks import DEMO_TASK, seeded
from trainer.model.policy import Policy
from trainer.model.rounding import MeasuredRounding

TITLE = "Rounding of published weights on the demo's task"
BASE = "float32"
TASKS = {"5e-6, 40 steps": (range(5), "5e-6", "40"), "1e-6, 100 steps": (range(3), "1e-6", "100")}
TEXT = """
SmolLM2-135M, pretrained, rounded to bfloat16 as most published checkpoints are, with the settings of
`examples/demo.env` in float32 but for the learning rate and the steps. The rows differ in what the engine gets of each
version: `float32` all of it; `unbiased` bfloat16 as published by default, up or down with the chance that makes the
mean exact; `nearest` bfloat16 rounded to the nearest.
"""


class Nearest(MeasuredRounding):
    """The rounding to the nearest, measured alike."""

    def bits(self, name: str, first: int, like: Tensor) -> Tensor:
        """Return half of the distance between two numbers, which carries from the middle on."""
        return torch.full_like(like, 1 << 15, dtype=torch.int32)


def nearest(policy: Policy) -> MeasuredRounding:
    """Return a rounding to the nearest, measured against the policy as it is now."""
    return Nearest(policy.model.named_parameters())


@contextmanager
def bfloat16_base(name: str) -> Iterator[Path]:
    """Write a model rounded to bfloat16, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).save_pretrained(directory)
        AutoTokenizer.from_pretrained(name).save_pretrained(directory)
        yield Path(directory)


def train(run: Run, *, is_nearest: bool = False) -> Result:
    """Make a run from the bfloat16 base."""
    with bfloat16_base(run.settings["MODEL_NAME"]) as base:
        settings = run.settings | {"MODEL_NAME": str(base)}
        result = in_process.train(replace(run, settings=settings), nearest if is_nearest else None)
    result.settings = dict(run.settings)
    return result


def _runs() -> Iterator[Run]:
    variants: dict[str, tuple[str, Callable[[Run], Result]]] = {
        BASE: ("float32", train),
        "unbiased": ("bfloat16", train),
        "nearest": ("bfloat16", partial(train, is_nearest=True)),
    }
    for task, (seeds, rate, steps) in TASKS.items():
        for seed in seeds:
            for variant, (published, make) in variants.items():
                own: Settings = {"LEARNING_RATE": rate, "MAX_STEPS": steps, "PUBLISH_TYPE": published}
                yield Run(task, variant, seed, seeded(DEMO_TASK | own, seed), make)


def show(results: Results) -> str:
    """Return the tables, one for each rate."""
    parts = [paragraph(TEXT + _shares(results))]
    for number, task in enumerate(TASKS):
        if any(result.task == task for result in results):
            parts += [f"### {TITLE}: {task}", comparison(results, task, BASE)]
            parts.append(curves(f"rounding_demo-{number}", results, task, f"Rounding, {task}"))
    return "\n\n".join([*parts, accuracy_note(results)])


def _shares(results: Results) -> str:
    """Return a sentence with the share of the training's change that the last version has."""
    found = [
        f"{statistics.fmean(run.figures['publish_share'] for run in runs):.2f} (`{variant}`, {task})"
        for task in TASKS
        for variant, runs in by_variant(results, task).items()
        if variant != BASE
    ]
    return f"Of the training's change of the weights, the last version has {', '.join(found)}." if found else ""


def summary(results: Results) -> list[str]:
    """Return a sentence for each rate."""
    orders = {task: ranking(results, task, BASE) for task in TASKS}
    return [f"[{TITLE}](#{anchor(TITLE)}), {task}, beside float32: {order}" for task, order in orders.items() if order]


PART = Part("rounding_demo", TITLE, list(_runs()), show, summary)
