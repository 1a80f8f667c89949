"""Supervised fine-tuning: the loss is transformers'; a run that was killed ends with equal bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.core.errors import ConfigurationError
from services.protocol.prompts import Demonstration, Prompt
from tests.trainer import rank_jobs
from tests.trainer.runs import resumed_run
from tests.trainer.tiny import plain_model, random_trees
from trainer.algorithm.packing import TrainingGroup
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.model.ranks import Ranks
from trainer.rollouts.groups import demonstrated

SFT: dict[str, Any] = {"method": "sft", "micro_batch_tokens": 90, "temperature": 0.5}


def without_advantages(groups: list[TrainingGroup]) -> list[TrainingGroup]:
    return [
        replace(group, sequences=[s.model_copy(update={"advantages": None}) for s in group.sequences])
        for group in groups
    ]


def transformers_loss(model: Path, groups: list[TrainingGroup]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of transformers with the same masks, -100 elsewhere, and the gradients."""
    plain = plain_model(model)
    count = sum(group.trained_tokens for group in groups)
    total = 0.0
    for group in groups:
        for sequence in group.sequences:
            ids = torch.tensor([group.prompt_ids + sequence.completion_ids.tolist()])
            labels = ids.clone()
            labels[0, : len(group.prompt_ids)] = -100
            labels[0, len(group.prompt_ids) :][torch.tensor(~sequence.mask)] = -100
            loss = plain(input_ids=ids, labels=labels, num_items_in_batch=count).loss
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def test_the_loss_is_that_of_transformers(alone: Ranks, model: Path) -> None:
    """The conversations have branches and several micro-batches; TEMPERATURE is that of evaluations."""
    groups = without_advantages(random_trees(1))
    expected, gradients = transformers_loss(model, groups)
    trained = rank_jobs.update(alone, model, SFT, groups)
    assert trained.result.metrics["loss"] == pytest.approx(expected, abs=1e-6)
    assert not {"kl_behaviour", "ratio_max", "importance_weight"} & trained.result.metrics.keys()
    for name, gradient in gradients.items():
        difference = np.linalg.norm(trained.gradients[name] - gradient.numpy()) / gradient.norm()
        assert difference < 1e-4, name


def test_a_run_that_was_cut_off_ends_with_the_very_weights_of_the_undisturbed_one(
    alone: Ranks, model: Path, tmp_path: Path
) -> None:
    settings = {"method": "sft", "learning_rate": 1e-3, "publish_type": "float32", "lora_rank": 4}
    run = resumed_run(alone, model, tmp_path, "acknowledge", **settings)
    for line in run.metrics:
        assert "loss" in line
        assert not {"staleness_mean", "zero_variance_groups", "seconds_publish", "seconds_evaluate"} & line.keys()
    assert not [*run.directory.glob("policy/v*")], "no engine asks for versions"


def test_no_engine_is_asked_unless_eval_every_asks(tmp_path: Path) -> None:
    def services(**settings: Any) -> set[str]:
        return {task.value for task in TrainerSettings.load(**settings).services}

    assert services(method="sft") == {"data-server"}
    assert services(method="sft", rollout="agent", agent="a:b") == {"data-server"}
    assert services(method="sft", eval_every=5) == {"data-server", "rollout-server", "reward-server"}
    assert services(method="sft", eval_every=5, eval_prompts=0) == {"data-server"}
    assert services(method="sft", eval_every=5, rollout="agent", agent="a:b") == {
        *("data-server", "rollout-server", "reward-server", "gateway")
    }
    assert services() == {"data-server", "rollout-server", "reward-server", "replay-buffer"}


def test_a_prompt_brings_its_sequences_and_one_without_is_an_error() -> None:
    settings = TrainerSettings.load(method="sft", run_id="r")
    lesson = Demonstration(completion="x", completion_ids=[5, 6, 7], loss_mask=[True, False, True], episode=3)
    prompt = Prompt(id="rows/train/0", prompt="q", ground_truth="", prompt_ids=[4], demonstrations=[lesson])
    group = demonstrated(settings, prompt)
    [sequence] = Objective(settings).training_group(group).sequences
    assert (group.prompt_ids, sequence.completion_ids.tolist(), sequence.episode) == ([4], [5, 6, 7], 3)
    assert sequence.mask.tolist() == [True, False, True]
    assert not group.prompt.demonstrations, "the record has the tokens once"
    with pytest.raises(ConfigurationError, match="gives no tokens to learn after rows/train/0"):
        demonstrated(settings, prompt.model_copy(update={"demonstrations": []}))
