"""Runs whose weights are rounded to bfloat16, without bias or to the nearest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.results import in_process
from benchmarks.results.runs import Result, Run
from trainer.model.policy import Policy
from trainer.model.rounding import MeasuredRounding, NearestRounding


class Nearest(MeasuredRounding):
    """The rounding to the nearest, measured alike."""

    offsets = NearestRounding.offsets


def to_nearest(policy: Policy) -> None:
    """Round a policy's weights to the nearest, measured against its masters as they are."""
    with policy.masters.in_place():
        policy.masters.rounding = Nearest(policy.masters.parameters.items())


@contextmanager
def bfloat16_base(name: str) -> Iterator[Path]:
    """Write a model rounded to bfloat16, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).save_pretrained(directory)
        AutoTokenizer.from_pretrained(name).save_pretrained(directory)
        yield Path(directory)


def train_from_bfloat16(run: Run, *, is_nearest: bool = False) -> Result:
    """Make a run from the model rounded to bfloat16."""
    with bfloat16_base(run.settings["MODEL_NAME"]) as base:
        settings = run.settings | {"MODEL_NAME": str(base)}
        result = in_process.train(replace(run, settings=settings), to_nearest if is_nearest else None)
    result.settings = dict(run.settings)
    return result
