"""What is saved of a policy is a model directory like the one that it came from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.trainer.tiny import FAMILIES, save_model
from trainer.config import TrainerSettings
from trainer.distributed import Ranks, join_ranks
from trainer.policy import load_policy, save_pretrained


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", FAMILIES["qwen2"])


@pytest.fixture
def alone() -> Iterator[Ranks]:
    with join_ranks() as ranks:
        yield ranks


def test_versions_are_saved_without_asking_for_the_model_again(alone: Ranks, model: Path, tmp_path: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config, tokenizer = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    policy = load_policy(TrainerSettings.load(model_name=str(model)), alone)
    shutil.rmtree(model)
    for dtype in (torch.bfloat16, torch.float32):
        saved = tmp_path / str(dtype)
        save_pretrained(policy, alone, saved, dtype)
        after = AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
        assert after.dtype == dtype
        for name, value in before.state_dict().items():
            torch.testing.assert_close(after.state_dict()[name], value.to(dtype), rtol=0, atol=0)
        assert AutoTokenizer.from_pretrained(saved).get_vocab() == tokenizer.get_vocab()
        of_its_own = {"dtype": str(dtype).removeprefix("torch."), "_name_or_path": str(saved)}
        assert AutoConfig.from_pretrained(saved).to_dict() == config.to_dict() | of_its_own
