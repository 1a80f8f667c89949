"""Measure how far engine and trainer agree on sampled tokens, by the number types in which each computes.

    python -m benchmarks.agreement [--model DIR] [--threads N] [--json FILE]

The embedded engine samples the completions of the demo's first step, in float32 and in bfloat16, from the model's own
weights. The trainer then computes the log-probabilities of the same tokens, in both types. Without rounding, the
difference would be 0 and the ratio of the policy loss 1.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from benchmarks.common import harness, models
from benchmarks.common.engine import embedded_engine
from benchmarks.common.job import DEMO
from local_runner.environment import cores
from services.core.compute import ComputeType
from services.data_server.batches import Batches
from services.data_server.settings import DataSettings
from services.embedded_engine.compute.loading import load
from services.embedded_engine.http.requests import SamplingParams
from services.embedded_engine.settings import EngineSettings
from services.protocol.prompts import Cursor, Split
from trainer.algorithm.packing import TrainingGroup, TrainingSequence, pack
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks

TYPES = (ComputeType.FLOAT32, ComputeType.BFLOAT16)


@dataclass(frozen=True)
class Agreement:
    """The differences between the log-probabilities of the sampled tokens in engine and trainer."""

    engine: str
    trainer: str
    tokens: int
    mean_difference: float
    largest_difference: float
    ratio_min: float
    ratio_max: float


def first_prompts(settings: TrainerSettings) -> list[list[int]]:
    """Return the token ids of the prompts of a run's first step."""
    prompts, _ = Batches.load(DataSettings.load()).batch(Split.TRAIN, Cursor(), settings.batch_size)
    return [prompt["prompt_ids"] for prompt in prompts]


def sample(kind: ComputeType, prompts: Sequence[list[int]], settings: TrainerSettings) -> list[TrainingGroup]:
    """Return a group of completions of every prompt, sampled by an engine that computes in ``kind``."""
    length = {"n": settings.group_size, "max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature}
    params = [SamplingParams.model_validate({**length, "sampling_seed": seed}) for seed in range(len(prompts))]
    with embedded_engine(load(EngineSettings.load(engine_dtype=kind))) as complete:
        done = complete(prompts, params)
    return [
        TrainingGroup(
            prompt,
            [TrainingSequence(s.output_ids, s.logprobs, [0.0] * len(s.output_ids)) for s in request.sequences],
            str(number),
        )
        for number, (prompt, request) in enumerate(zip(prompts, done, strict=True))
    ]


def compare(engine: ComputeType, kind: ComputeType, groups: Sequence[TrainingGroup]) -> Agreement:
    """Compare the engine's log-probabilities with those of a trainer that computes in ``kind``."""
    with join_ranks() as ranks, torch.no_grad():
        policy = load_policy(TrainerSettings.load(compute_type=kind), ranks)
        logprobs = policy(pack(groups).to(ranks.device))[0].cpu()
    behaviour = torch.tensor([x for group in groups for s in group.sequences for x in s.behaviour_logprobs])
    difference = logprobs - behaviour
    ratio = difference.exp()
    mean, largest = float(difference.abs().mean()), float(difference.abs().max())
    return Agreement(engine.value, kind.value, len(difference), mean, largest, float(ratio.min()), float(ratio.max()))


def show(found: Sequence[Agreement], settings: TrainerSettings) -> Table:
    """Return the measurements as a table."""
    return harness.table(
        f"{settings.batch_size} prompts, {settings.group_size} completions each, up to {settings.max_new_tokens} "
        "tokens: |log-probability of the trainer - of the engine|, and the ratios' range",
        ("engine", "trainer", "tokens", "mean", "largest", "least ratio", "largest ratio"),
        [
            (
                one.engine,
                one.trainer,
                one.tokens,
                f"{one.mean_difference:.5f}",
                f"{one.largest_difference:.4f}",
                f"{one.ratio_min:.3f}",
                f"{one.ratio_max:.3f}",
            )
            for one in found
        ],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("agreement", rounds=1, quick="the same: one round")
    parser.add_argument("--model", default=str(models.PRETRAINED), help="model directory or name")
    parser.add_argument("--threads", type=int, default=cores(), help="processor threads")
    given = parser.parse(arguments)
    # Each component reads its own settings from the environment of a demo.
    os.environ |= DEMO | {"MODEL_NAME": given.model}
    torch.set_num_threads(given.threads)
    settings = TrainerSettings.load()
    prompts = first_prompts(settings)
    found = []
    for engine in TYPES:
        groups = sample(engine, prompts, settings)
        for kind in TYPES:
            found.append(compare(engine, kind, groups))
            harness.say(f"engine {engine}, trainer {kind}: measured")
    harness.finish(given, [show(found, settings)], found)


if __name__ == "__main__":
    main()
