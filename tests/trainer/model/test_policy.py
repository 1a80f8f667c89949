"""A policy is saved as a model directory like the one that it came from, which engines load."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from services.embedded_engine.compute.loading import load
from services.rollout_server.settings import RolloutSettings
from tests.tolerance import logprob_tolerance
from tests.trainer import rank_jobs
from tests.trainer.processes import run_on_ranks
from tests.trainer.tiny import FAMILIES, plain_logprobs, plain_model, random_groups, save_model
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy, save_pretrained
from trainer.model.ranks import Ranks, join_ranks


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


def test_adapters_trained_on_two_ranks_are_published_merged_and_an_engine_computes_the_same(
    model: Path, tmp_path: Path
) -> None:
    groups, published = random_groups(1), tmp_path / "published"
    first, second = run_on_ranks(2, rank_jobs.train_and_publish, model, published, groups, {"lora_rank": 4})
    assert first == second
    engine = load(RolloutSettings.load(model_name=str(model), engine_dtype="float32"))
    engine.model.weights = engine.read_weights(published)
    start = plain_model(model)
    for group, trained in zip(groups, first, strict=True):
        before = plain_logprobs(start, group)
        for sequence, wanted, untrained in zip(group.sequences, trained, before, strict=True):
            ids = group.prompt_ids + sequence.completion_ids
            with torch.inference_mode():
                logprobs = engine.model.logits(engine.model.prefill([ids], None)).log_softmax(-1)
            given = [float(logprobs[row, ids[row + 1]]) for row in range(len(group.prompt_ids) - 1, len(ids) - 1)]
            assert given == pytest.approx(wanted, abs=logprob_tolerance("float32"))
            assert given != pytest.approx(untrained.tolist(), abs=10 * logprob_tolerance("float32"))
