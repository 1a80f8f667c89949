"""A run with ADVANTAGE=rae that was cut off: its baselines are those of the last completed step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.core.errors import DependencyLostError
from tests.trainer.runs import resumed_run, train
from trainer.model.ranks import Ranks
from trainer.rank_calls import RankCalls

SETTINGS: dict[str, Any] = {"advantage": "rae", "learning_rate": 1e-3}


def test_a_run_that_was_cut_off_ends_with_the_very_weights_and_baselines_of_the_undisturbed_one(
    alone: Ranks, model: Path, tmp_path: Path
) -> None:
    resumed = resumed_run(alone, model, tmp_path, "free_engines_memory", **SETTINGS)
    baselines = resumed.loop.state.role_baselines
    assert 0 < baselines[""][-1] < 0.5, "rewards are 0 and 1 in each step"
    assert resumed.metrics[-1]["role_baseline_all"] == baselines[""][-1]


def test_an_update_that_fails_leaves_the_baselines_of_the_step_before(
    alone: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advantages of the step are known, and the weights are still those of the step before."""
    whole = train(alone, model, tmp_path / "whole", **SETTINGS)
    with monkeypatch.context() as patch:
        update = RankCalls.update

        def fail_once(self: RankCalls, groups: Any, step: int, position: float) -> Any:
            if step == 2:
                raise DependencyLostError("a rank")
            return update(self, groups, step, position)

        patch.setattr(RankCalls, "update", fail_once)
        cut = train(alone, model, tmp_path / "cut", checkpoint_every=0, **SETTINGS)  # saves the state as it leaves
    assert str(cut.error) == "a rank"
    resumed = train(alone, model, tmp_path / "cut", **SETTINGS)
    assert resumed.loop.state.role_baselines == whole.loop.state.role_baselines
    assert resumed.ends_as(whole)
