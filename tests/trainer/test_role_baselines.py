"""A run with ADVANTAGE=rae that was cut off: its baselines are those of the last completed step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest

from services.core.errors import DependencyLostError
from services.protocol.prompts import DataStats
from tests.trainer.rank_jobs import Arrays, make_learner, weights_of
from tests.trainer.test_lost_services import Outside
from trainer.checkpoints.checkpoint import CheckpointStore
from trainer.loop import TrainingLoop
from trainer.model.ranks import Ranks
from trainer.rank_calls import RankCalls
from trainer.reporting.run_files import RunFiles
from trainer.reporting.status import RunStatus
from trainer.run_checkpoints import resume
from trainer.service_calls import ServiceCalls

STEPS = 4


def train(
    ranks: Ranks, model: Path, directory: Path, lost: str = "", every: int = 1
) -> tuple[Arrays, dict[str, dict[int, float]]]:
    """Train from the newest checkpoint, if any, until a service is lost or to the end; return weights and baselines."""
    settings: dict[str, Any] = {"advantage": "rae", "learning_rate": 1e-3, "eval_prompts": 0, "checkpoint_every": every}
    learner = make_learner(ranks, model, STEPS, shared_dir=directory, run_id="r", **settings)
    checkpoints = CheckpointStore(learner.settings.checkpoint_dir, 2, ranks)
    data = DataStats(source="walks", train_prompts=9, test_prompts=1, refused={})
    state = resume(learner.settings, ranks, learner.policy, data, learner, checkpoints)
    outside = Outside(lost)
    outside.steps = state.step
    rank_calls = RankCalls(learner.settings, ranks, learner, cast(Any, outside), checkpoints, lambda: False)
    files = RunFiles(learner.settings, state.step, str)
    loop = TrainingLoop(
        learner.settings, cast(ServiceCalls, outside), rank_calls, files, RunStatus(), state, STEPS, 4 * STEPS
    )
    loop.publisher.publish = outside.publish  # type: ignore[method-assign]
    try:
        with rank_calls.leading():
            loop.run()
    except DependencyLostError:
        assert lost
    files.close()
    return weights_of(learner.policy), loop.state.role_baselines


@pytest.mark.parametrize("lost", ["draw_replayed", "free_engines_memory", "publish"])
def test_a_run_that_was_cut_off_ends_with_the_very_weights_and_baselines_of_the_undisturbed_one(
    alone: Ranks, model: Path, tmp_path: Path, lost: str
) -> None:
    undisturbed, baselines = train(alone, model, tmp_path / "undisturbed")
    train(alone, model, tmp_path / "cut", lost)
    resumed, after = train(alone, model, tmp_path / "cut")
    assert after == baselines
    assert 0 < baselines[""][-1] < 0.5, "rewards are 0 and 1 in each step"
    for name, values in undisturbed.items():
        assert np.array_equal(resumed[name], values), name
    lines = (tmp_path / "cut" / "runs" / "r" / "metrics.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["role_baseline_all"] for line in lines][-1] == baselines[""][-1]


def test_an_update_that_fails_leaves_the_baselines_of_the_step_before(
    alone: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advantages of the step are known, and the weights are still those of the step before."""
    undisturbed, baselines = train(alone, model, tmp_path / "undisturbed")
    with monkeypatch.context() as patch:
        update = RankCalls.update

        def fail_once(self: RankCalls, groups: Any, step: int, position: float) -> Any:
            if step == 2:
                raise DependencyLostError("a rank")
            return update(self, groups, step, position)

        patch.setattr(RankCalls, "update", fail_once)
        train(alone, model, tmp_path / "cut", "update", every=0)  # saves the state as it leaves
    resumed, after = train(alone, model, tmp_path / "cut")
    assert after == baselines
    assert all(np.array_equal(resumed[name], values) for name, values in undisturbed.items())
