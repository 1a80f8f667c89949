"""Whole steps of PPO with a critic, as the driver takes them: on one rank and on two, and in a run that was cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
from transformers import AutoModelForTokenClassification

from services.core.errors import DependencyLostError
from services.protocol.prompts import DataStats
from tests.trainer.processes import run_on_ranks
from tests.trainer.rank_jobs import Arrays, make_learner, weights_of
from tests.trainer.test_lost_services import Outside
from trainer.checkpoints.checkpoint import CheckpointStore
from trainer.loop import TrainingLoop
from trainer.model.critic import CriticLearner
from trainer.model.ranks import Ranks
from trainer.rank_calls import RankCalls
from trainer.reporting.run_files import RunFiles
from trainer.reporting.status import RunStatus
from trainer.run_checkpoints import resume
from trainer.service_calls import ServiceCalls

STEPS, PROMPTS = 4, 3
"""A run of more steps than prompts, of which each step takes one: the schedule follows the prompts."""
BOTH = pytest.mark.parametrize("kind", ["own", "shared"])
SETTINGS: dict[str, Any] = {
    "advantage": "gae",
    "critic_warmup_steps": 1,
    "learning_rate": 1e-3,
    "lr_schedule": "linear",
    "critic_learning_rate": 1e-3,
    "eval_prompts": 0,
    "checkpoint_every": 1,
    "publish_type": "float32",
    "updates_per_batch": 2,
    "epochs_per_batch": 2,
    "run_id": "r",
}


def train(ranks: Ranks, model: Path, directory: Path, kind: str, lost: str = "", **settings: Any) -> Arrays:
    """Train from the newest checkpoint, if any, until a service is lost or to the end; return all weights."""
    learner = make_learner(ranks, model, STEPS, shared_dir=directory, critic=kind, **(SETTINGS | settings))
    critic = CriticLearner(learner)
    checkpoints = CheckpointStore(learner.settings.checkpoint_dir, 2, ranks)
    data = DataStats(source="walks", train_prompts=9, test_prompts=1, refused={})
    state = resume(learner.settings, ranks, learner.policy, data, learner, checkpoints, critic)
    outside = Outside(lost)
    outside.steps = state.step
    rank_calls = RankCalls(learner.settings, ranks, learner, cast(Any, outside), checkpoints, lambda: False, critic)
    if ranks.is_main:
        files = RunFiles(learner.settings, state.step, str)
        loop = TrainingLoop(
            learner.settings, cast(ServiceCalls, outside), rank_calls, files, RunStatus(), state, STEPS, PROMPTS
        )
        loop.publisher.publish = outside.publish  # type: ignore[method-assign]
        try:
            with rank_calls.leading():
                loop.run()
                rank_calls.save_model()
        except DependencyLostError:
            assert lost
        files.close()
    else:
        rank_calls.follow()
    return weights_of(learner.policy) | {f"critic.{n}": w for n, w in weights_of(critic.module).items()}


def records(directory: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (directory / "runs" / "r" / "metrics.jsonl").read_bytes().splitlines()]


@BOTH
def test_the_critic_learns_first_then_both_and_metrics_say_so(
    alone: Ranks, model: Path, tmp_path: Path, kind: str
) -> None:
    train(alone, model, tmp_path, kind, updates_per_batch=1, epochs_per_batch=1)
    warm_up, *others = records(tmp_path)
    assert "loss" not in warm_up, "the policy stays"
    for record in (warm_up, *others):
        assert {"value_loss", "value_clip_fraction", "value_mean", "return_mean", "explained_variance"} <= record.keys()
    for record in others:
        assert {"loss", "entropy"} <= record.keys()
    assert [record["learning_rate"] for record in others] == pytest.approx([2e-3 / 3, 1e-3 / 3, 0])
    assert warm_up["value_mean"] == 0
    assert others[-1]["value_mean"] != 0
    saved = tmp_path / "runs" / "r" / "critic"
    _, said = AutoModelForTokenClassification.from_pretrained(saved, output_loading_info=True)
    assert not said["missing_keys"]


@BOTH
@pytest.mark.parametrize("lost", ["draw_replayed", "publish"])
def test_a_run_that_was_cut_off_ends_with_the_very_weights_of_the_undisturbed_one(
    alone: Ranks, model: Path, tmp_path: Path, kind: str, lost: str
) -> None:
    undisturbed = train(alone, model, tmp_path / "undisturbed", kind)
    train(alone, model, tmp_path / "cut", kind, lost)
    resumed = train(alone, model, tmp_path / "cut", kind)
    assert resumed.keys() == undisturbed.keys()
    for name, values in undisturbed.items():
        assert np.array_equal(resumed[name], values), name


@BOTH
def test_two_ranks_take_the_steps_of_one(alone: Ranks, model: Path, tmp_path: Path, kind: str) -> None:
    expected = train(alone, model, tmp_path / "one", kind)
    for weights in run_on_ranks(2, train, model, tmp_path / "two", kind):
        assert weights.keys() == expected.keys()
        for name, values in expected.items():
            assert np.abs(weights[name] - values).max() < 2e-4, name
    for one, two in zip(records(tmp_path / "one"), records(tmp_path / "two"), strict=True):
        assert two["value_loss"] == pytest.approx(one["value_loss"], abs=1e-4)
        assert two["explained_variance"] == pytest.approx(one["explained_variance"], abs=1e-3)
