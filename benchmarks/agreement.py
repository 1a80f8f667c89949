"""Measures how far engine and trainer agree on sampled tokens, by the types of numbers that each computes in.

    python -m benchmarks.agreement [--model DIR] [--threads N] [--json FILE]

The embedded engine samples the completions of the demo's first step, in float32 and in bfloat16, from the model's own
weights. The trainer then computes the log-probabilities of the same tokens, in both types: their difference is 0, and
the ratio of the policy loss is 1, for an engine and a trainer without rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import models
from benchmarks.common.ending import end_in_order
from benchmarks.common.job import ROOT
from local_runner import spec
from local_runner.environment import cores
from services.core.compute import ComputeType
from services.data_server import app as data_server
from services.data_server.settings import DataSettings
from services.embedded_engine.compute.batch import Limits
from services.embedded_engine.compute.engine import Engine
from services.embedded_engine.compute.loading import load
from services.embedded_engine.http import sglang_wire
from services.protocol import Cursor, Split
from services.rollout_server.settings import RolloutSettings
from trainer.algorithm.packing import TrainingGroup, TrainingSequence, pack
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks

TYPES = (ComputeType.FLOAT32, ComputeType.BFLOAT16)
GENERATION_SECONDS = 600.0


@dataclass(frozen=True)
class Agreement:
    """The differences between two engines' log-probabilities of the sampled tokens."""

    engine: str
    trainer: str
    tokens: int
    mean_difference: float
    largest_difference: float
    ratio_min: float
    ratio_max: float


def first_prompts(settings: TrainerSettings) -> list[list[int]]:
    """Return the token ids of the prompts of a run's first step."""
    with tempfile.TemporaryDirectory() as directory:
        data = data_server.load(DataSettings.load(data_state_dir=Path(directory)))
        prompts, _ = data.batch(Split.TRAIN, Cursor(), settings.batch_size, shard_index=0, shard_count=1)
        data.state.close()
    return [prompt["prompt_ids"] for prompt in prompts]


def sample(kind: ComputeType, prompts: Sequence[list[int]], settings: TrainerSettings) -> list[TrainingGroup]:
    """Return a group of completions of every prompt, sampled by an engine that computes in ``kind``."""
    loaded = load(RolloutSettings.load(engine_dtype=kind))
    failures: list[Exception] = []
    limits = Limits(loaded.max_running, max_waiting=len(prompts), prefill_tokens=2048)
    engine = Engine(loaded.model, loaded.cache, limits, "0", loaded.decode_text, failures.append)
    known = sglang_wire.PromptLimits(loaded.model.architecture.vocab_size, loaded.model.context_length, loaded.end_ids)
    engine.start()
    try:
        pending = []
        for seed, prompt in enumerate(prompts):
            fields = {"n": settings.group_size, "max_new_tokens": settings.max_new_tokens, "sampling_seed": seed}
            params = sglang_wire.read_sampling({**fields, "temperature": settings.temperature})
            request = sglang_wire.make_request(prompt, params, known)
            engine.submit(request)
            pending.append(request.done)
        done = [future.result(GENERATION_SECONDS) for future in pending]
    finally:
        engine.stop()
    return [
        TrainingGroup(prompt, [TrainingSequence(s.output_ids, s.logprobs, 0.0) for s in request.sequences], str(number))
        for number, (prompt, request) in enumerate(zip(prompts, done, strict=True))
    ]


def compare(engine: ComputeType, kind: ComputeType, groups: Sequence[TrainingGroup]) -> Agreement:
    """Return how far a trainer that computes in ``kind`` is from what the engine said of its completions."""
    with join_ranks() as ranks, torch.no_grad():
        policy = load_policy(TrainerSettings.load(compute_type=kind), ranks)
        logprobs = policy(pack(groups).to(ranks.device))[0].cpu()
    behaviour = torch.tensor([x for group in groups for s in group.sequences for x in s.behaviour_logprobs])
    difference = logprobs - behaviour
    ratio = difference.exp()
    return Agreement(
        engine.value,
        kind.value,
        len(difference),
        float(difference.abs().mean()),
        float(difference.abs().max()),
        float(ratio.min()),
        float(ratio.max()),
    )


def show(found: Sequence[Agreement], settings: TrainerSettings) -> Table:
    """Return the measurements as a table."""
    table = Table(
        title=f"{settings.batch_size} prompts, {settings.group_size} completions each, up to "
        f"{settings.max_new_tokens} tokens: |log-probability of the trainer - of the engine|, and the ratios' range"
    )
    for name in ("engine", "trainer", "tokens", "mean", "largest", "least ratio", "largest ratio"):
        table.add_column(name, justify="left" if name in ("engine", "trainer") else "right")
    for one in found:
        differences = (f"{one.mean_difference:.5f}", f"{one.largest_difference:.4f}")
        ratios = (f"{one.ratio_min:.3f}", f"{one.ratio_max:.3f}")
        table.add_row(one.engine, one.trainer, str(one.tokens), *differences, *ratios)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement")
    parser.add_argument("--model", default=str(models.PRETRAINED), help="model directory or name")
    parser.add_argument("--threads", type=int, default=cores(), help="processor threads")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    given = parser.parse_args(arguments)
    end_in_order()
    # As a run of the demo has them, for each component to read its own.
    os.environ |= spec.env_file(ROOT / "demo.env") | {"MODEL_NAME": given.model}
    torch.set_num_threads(given.threads)
    settings = TrainerSettings.load()
    prompts = first_prompts(settings)
    found = []
    for engine in TYPES:
        groups = sample(engine, prompts, settings)
        for kind in TYPES:
            found.append(compare(engine, kind, groups))
            print(f"engine {engine}, trainer {kind}: measured", file=sys.stderr)
    Console().print(show(found, settings))
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=2))


if __name__ == "__main__":
    main()
