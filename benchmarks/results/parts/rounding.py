"""Rounding to bfloat16 on the tiny task: by the engine that samples, and of the weights that it gets."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.results import in_process
from benchmarks.results.equivalence import ACCURACY
from benchmarks.results.in_process import InProcess
from benchmarks.results.runs import Part, Result, Results, Run, Settings, result_of
from benchmarks.results.tables import accuracy_note, anchor, comparison, paragraph, ranking, spread, table
from benchmarks.results.tasks import REWARDS, TINY, seeded, with_model
from trainer.model.ranks import join_ranks
from trainer.model.rounding import Rounding, UnbiasedRounding

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
