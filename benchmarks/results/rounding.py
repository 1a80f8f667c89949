"""Runs whose weights reach the engine rounded to bfloat16, without bias or to the nearest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.results import in_process
from benchmarks.results.runs import Result, Run
from trainer.model.policy import Policy
from trainer.model.rounding import MeasuredRounding


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
    """Make a run from the model rounded to bfloat16."""
    with bfloat16_base(run.settings["MODEL_NAME"]) as base:
        settings = run.settings | {"MODEL_NAME": str(base)}
        result = in_process.train(replace(run, settings=settings), to_nearest if is_nearest else None)
    result.settings = dict(run.settings)
    return result
