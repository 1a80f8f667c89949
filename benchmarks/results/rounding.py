"""Rounding to bfloat16: by the engine that samples, of the weights that it gets, and what learning makes of both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import in_process
from benchmarks.results.comparisons import (
    ACCURACY,
    accuracy_note,
    anchor,
    comparison,
    paragraph,
    ranking,
    spread,
    table,
)
from benchmarks.results.in_process import InProcess
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, Run, Settings, by_variant, result_of
from benchmarks.results.tasks import DEMO_TASK, REWARDS, TINY, seeded, with_model
from trainer.model.policy import Policy
from trainer.model.ranks import join_ranks
from trainer.model.rounding import MeasuredRounding, Rounding, UnbiasedRounding

TITLE = "Rounding"
SEEDS = range(5)
BASE = "float32 engine"
BFLOAT16: Settings = {"ENGINE_DTYPE": "bfloat16"}
ENGINES: dict[str, Settings] = {
    BASE: {},
    "bfloat16 engine": BFLOAT16,
    "bfloat16 engine, ratio to the policy that sampled": BFLOAT16 | {"IMPORTANCE_CORRECTION": "none"},
}
LOSSES: dict[str, Settings] = {"clipped": {}, "GSPO": {"LOSS": "gspo"}}
AFTER = (1, 10, 30)
"""Steps after which the share is measured."""
NEAREST, DITHER, FRESH = "to nearest", "dither", "fresh bits"
SHARE_RATES, SHARE_SEEDS = ("1e-6", "1e-5", "1e-4"), range(3)
SHARE: Settings = {"MAX_STEPS": str(max(AFTER)), "EVAL_PROMPTS": "0"}


class FreshRounding(UnbiasedRounding):
    """Unbiased rounding whose bits are drawn anew for each version."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version

    def bits(self, name: str, first: int, like: torch.Tensor) -> torch.Tensor:
        """See UnbiasedRounding."""
        return super().bits(f"{name} {self.version}", first, like)


class Measured(InProcess):
    """A run that measures which share of the weights' change each rounding to bfloat16 would publish.

    The engine gets the weights in float32, so that the run's course does not depend on a rounding.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.start = self._weights()
        self.shares: dict[str, float] = {}
        self.published: dict[str, dict[str, torch.Tensor]] = {}
        """The version before the last one of AFTER, by form."""

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.policy.full_parameters(Rounding(torch.float32))}

    def _publish(self, version: int) -> None:
        super()._publish(version)
        if version not in (*AFTER, AFTER[-1] - 1):
            return
        trained = self._weights()
        squared = sum(float(((trained[name] - start) ** 2).sum()) for name, start in self.start.items())
        forms = {NEAREST: Rounding(torch.bfloat16), DITHER: UnbiasedRounding(), FRESH: FreshRounding(version)}
        for form, rounding in forms.items():
            rounded = {name: rounding(name, value) for name, value in trained.items()}
            if version == AFTER[-1]:
                differ = sum(int((rounded[name] != before).sum()) for name, before in self.published[form].items())
                self.shares[f"{form}, differ"] = differ / sum(value.numel() for value in rounded.values())
            self.published[form] = rounded
            along = sum(
                float(((rounded[name].float() - start) * (trained[name] - start)).sum())
                for name, start in self.start.items()
            )
            self.shares[f"{form}, {version}"] = along / squared


def train_measured(run: Run) -> Result:
    """Train a model that was loaded from a bfloat16 checkpoint, and measure shares."""
    started = time.process_time()
    result = result_of(run)
    with join_ranks() as ranks, with_model(run.settings, is_bfloat16=True) as settings:
        measured = Measured(settings, REWARDS[settings["REWARD_FN"]], ranks)
        measured.train(result)
    result.figures |= measured.shares
    result.processor_seconds = time.process_time() - started
    return result


RUNS = [
    Run(loss, engine, seed, seeded(TINY | settings | own, seed), in_process.train)
    for seed in SEEDS
    for loss, settings in LOSSES.items()
    for engine, own in ENGINES.items()
] + [
    Run("share", rate, seed, seeded(TINY | SHARE | {"LEARNING_RATE": rate}, seed), train_measured)
    for seed in SHARE_SEEDS
    for rate in SHARE_RATES
]


def shares(results: Results) -> str:
    """Return a table of the share that arrives, by learning rate, rounding and step; "" without results."""
    rows = [
        (f"{rate}, {form}", *(spread([run.figures[f"{form}, {key}"] for run in own], 3) for key in (*AFTER, "differ")))
        for rate in SHARE_RATES
        if (own := [run for run in results if run.task == "share" and run.variant == rate])
        for form in (NEAREST, DITHER, FRESH)
    ]
    steps = (f"after {step} step{'s'[: step > 1]}" for step in AFTER)
    return table(("", *steps, f"weights that differ from step {AFTER[-1] - 1}'s"), rows) if rows else ""


def show(results: Results) -> str:
    """Return the section: each loss with both engines."""
    text = """
    The tiny task in one process, on policy, with an engine in float32 and one in bfloat16, which computes other
    log-probabilities than the trainer for the same weights; weights are published in float32. With one update a batch
    the ratio is against the trainer's own policy, and exactly 1. Against the policy that sampled
    (`IMPORTANCE_CORRECTION=none`) it has the engine's rounding, which is larger than the bounds of GSPO, 3e-4 and 4e-4.
    """
    parts = [paragraph(text)]
    for loss in LOSSES:
        own = [result for result in results if result.task == loss]
        if own:
            parts += [f"### {TITLE}: {loss}", comparison(own, loss, BASE)]
    parts.append(accuracy_note(results))
    if shown := shares(results):
        published = """
        Weights are published in bfloat16 by default, and the checkpoint that a run starts from lies on bfloat16's
        grid. A small step moves a weight by less than half of the grid's spacing, so that rounding to the nearest takes
        it back. The table has the share <published - start, trained - start> / |trained - start|^2 over all weights, of
        the tiny model from a bfloat16 checkpoint. `dither`, which is what the trainer does, rounds each weight up or
        down by a random number that is fixed for each weight, and `fresh bits` by one that is drawn anew for each
        version. The last column has the share of weights that differ between the last two versions.
        """
        parts += [f"### {TITLE}: the share of an update that is published", paragraph(published), shown]
    return "\n\n".join(parts)


def summary(results: Results) -> list[str]:
    """Return a sentence for each loss, and one about the share."""
    smallest = [run for run in results if run.task == "share" and run.variant == SHARE_RATES[0]]
    published = [
        f"{form} {' and '.join(spread([run.figures[f'{form}, {step}'] for run in smallest]) for step in AFTER[::2])}"
        for form in (NEAREST, DITHER)
    ]
    share = (
        f"[{TITLE}](#{anchor(TITLE)}), share of the weights' change that is published in bfloat16 at a learning rate "
        f"of {SHARE_RATES[0]}, after {AFTER[0]} and {AFTER[-1]} steps: {', '.join(published)}."
    )
    sentences = [
        f"[{TITLE}](#{anchor(TITLE)}), {loss}, accuracy beside a {BASE}: {order}"
        for loss in LOSSES
        if (order := ranking(results, loss, BASE, ACCURACY))
    ]
    return [*sentences, *([share] if smallest else [])]


PART = Part("rounding", TITLE, RUNS, show, summary)


DEMO_TITLE = "Rounding of published weights on the demo's task"
DEMO_BASE = "float32"
DEMO_TASKS = {"5e-6, 40 steps": (range(5), "5e-6", "40"), "1e-6, 100 steps": (range(3), "1e-6", "100")}
DEMO_TEXT = """
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


def to_nearest(policy: Policy) -> MeasuredRounding:
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


def train_from_bfloat16(run: Run, *, is_nearest: bool = False) -> Result:
    """Make a run from the bfloat16 base."""
    with bfloat16_base(run.settings["MODEL_NAME"]) as base:
        settings = run.settings | {"MODEL_NAME": str(base)}
        result = in_process.train(replace(run, settings=settings), to_nearest if is_nearest else None)
    result.settings = dict(run.settings)
    return result


def _demo_runs() -> Iterator[Run]:
    variants: dict[str, tuple[str, Callable[[Run], Result]]] = {
        DEMO_BASE: ("float32", train_from_bfloat16),
        "unbiased": ("bfloat16", train_from_bfloat16),
        "nearest": ("bfloat16", partial(train_from_bfloat16, is_nearest=True)),
    }
    for task, (seeds, rate, steps) in DEMO_TASKS.items():
        for seed in seeds:
            for variant, (published, make) in variants.items():
                own: Settings = {"LEARNING_RATE": rate, "MAX_STEPS": steps, "PUBLISH_TYPE": published}
                yield Run(task, variant, seed, seeded(DEMO_TASK | own, seed), make)


def demo_show(results: Results) -> str:
    """Return the tables, one for each rate."""
    parts = [paragraph(DEMO_TEXT + _published_shares(results))]
    for number, task in enumerate(DEMO_TASKS):
        if any(result.task == task for result in results):
            parts += [f"### {DEMO_TITLE}: {task}", comparison(results, task, DEMO_BASE)]
            parts.append(curves(f"rounding_demo-{number}", results, task, f"Rounding, {task}"))
    return "\n\n".join([*parts, accuracy_note(results)])


def _published_shares(results: Results) -> str:
    """Return a sentence with the share of the training's change that the last version has."""
    found = [
        f"{statistics.fmean(run.figures['publish_share'] for run in runs):.2f} (`{variant}`, {task})"
        for task in DEMO_TASKS
        for variant, runs in by_variant(results, task).items()
        if variant != DEMO_BASE
    ]
    return f"Of the training's change of the weights, the last version has {', '.join(found)}." if found else ""


def demo_summary(results: Results) -> list[str]:
    """Return a sentence for each rate."""
    orders = {task: ranking(results, task, DEMO_BASE) for task in DEMO_TASKS}
    return [
        f"[{DEMO_TITLE}](#{anchor(DEMO_TITLE)}), {task}, beside float32: {order}"
        for task, order in orders.items()
        if order
    ]


DEMO_PART = Part("rounding_demo", DEMO_TITLE, list(_demo_runs()), demo_show, demo_summary)
