"""Whole steps of PPO with a critic, as the driver takes them: on one rank and on two, and in a run that was cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from transformers import AutoModelForTokenClassification

from tests.trainer.processes import run_on_ranks
from tests.trainer.runs import resumed_run, train, weights_after
from trainer.model.ranks import Ranks

PROMPTS = 3
"""Fewer than steps: the schedule follows the prompts."""
BOTH = pytest.mark.parametrize("kind", ["own", "shared"])
SETTINGS: dict[str, Any] = {
    "advantage": "gae",
    "critic_warmup_steps": 1,
    "learning_rate": 1e-3,
    "lr_schedule": "linear",
    "critic_learning_rate": 1e-3,
    "publish_type": "float32",
    "updates_per_batch": 2,
    "epochs_per_batch": 2,
}


@BOTH
def test_the_critic_learns_first_then_both_and_metrics_say_so(
    alone: Ranks, model: Path, tmp_path: Path, kind: str
) -> None:
    once = {"updates_per_batch": 1, "epochs_per_batch": 1}
    run = train(alone, model, tmp_path, prompts=PROMPTS, critic=kind, **SETTINGS | once)
    warm_up, *others = run.metrics
    assert "loss" not in warm_up, "the policy stays"
    for record in (warm_up, *others):
        assert {"value_loss", "value_clip_fraction", "value_mean", "return_mean", "explained_variance"} <= record.keys()
    for record in others:
        assert {"loss", "entropy"} <= record.keys()
    assert [record["learning_rate"] for record in others] == pytest.approx([2e-3 / 3, 1e-3 / 3, 0])
    assert warm_up["value_mean"] == 0
    assert others[-1]["value_mean"] != 0
    run.loop.rank_calls.save_model()
    _, said = AutoModelForTokenClassification.from_pretrained(run.directory / "critic", output_loading_info=True)
    assert not said["missing_keys"]


def test_a_run_that_was_cut_off_ends_with_the_very_weights_of_the_undisturbed_one(
    alone: Ranks, model: Path, tmp_path: Path
) -> None:
    """It goes on after the warm-up, in which the policy's optimizer has not begun."""
    resumed_run(alone, model, tmp_path, "draw_replayed", PROMPTS, critic="own", **SETTINGS)


@BOTH
def test_ranks_take_the_steps_of_one(alone: Ranks, model: Path, tmp_path: Path, kind: str) -> None:
    settings = SETTINGS | {"critic": kind}
    one = train(alone, model, tmp_path / "one", prompts=PROMPTS, **settings)
    for weights in run_on_ranks(2, weights_after, model, tmp_path / "more", settings, PROMPTS):
        assert weights.keys() == one.weights.keys()
        for name, values in one.weights.items():
            assert np.abs(weights[name] - values).max() < 2e-4, name
    lines = [orjson.loads(line) for line in (tmp_path / "more/runs/r/metrics.jsonl").read_bytes().splitlines()]
    for expected, found in zip(one.metrics, lines, strict=True):
        assert found["value_loss"] == pytest.approx(expected["value_loss"], abs=1e-4)
        assert found["explained_variance"] == pytest.approx(expected["explained_variance"], abs=1e-3)
