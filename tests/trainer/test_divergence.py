"""Updates that are not finite are skipped; too many in a row end the run, with the batch kept for inspection."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import orjson
import pytest

from tests.sequences import changed
from tests.trainer.rank_jobs import make_learner, run_state, weights_of
from tests.trainer.tiny import random_groups
from trainer.algorithm.packing import TrainingGroup
from trainer.loop import TrainingLoop
from trainer.model.ranks import Ranks
from trainer.rank_calls import RankCalls, TrainingDivergedError
from trainer.reporting.run_files import RunFiles

GOOD = random_groups(seed=1)
BOUND = 2


def broken(groups: list[TrainingGroup]) -> list[TrainingGroup]:
    first, *others = groups
    sequences = [changed(s, logprobs=[math.nan] * s.tokens) for s in first.sequences]
    return [replace(first, sequences=sequences), *others]


def test_a_run_goes_on_after_skipped_updates_and_too_many_in_a_row_end_it_with_the_batch_in_a_file(
    alone: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step counts once, however many updates it has."""
    monkeypatch.setattr("trainer.loop.MAX_SKIPPED_STEPS", BOUND)
    settings = {"updates_per_batch": 4, "importance_correction": "none"}
    learner = make_learner(alone, model, shared_dir=tmp_path, run_id="r", **settings)
    files, unused, state = RunFiles(learner.settings, 0, str), cast(Any, MagicMock()), run_state(learner, 4)
    rank_calls = RankCalls(learner.settings, alone, learner, unused, unused)
    loop = TrainingLoop(learner.settings, unused, rank_calls, files, unused, state, learner.total_steps, 40)
    all_broken, before = [broken([group])[0] for group in GOOD], weights_of(learner.policy)
    for _ in range(BOUND):
        assert loop.update(all_broken).skipped == 4
    assert all((weights == before[name]).all() for name, weights in weights_of(learner.policy).items())
    assert loop.update(broken(GOOD)).skipped == 1, "the others were taken, so the count begins anew"
    assert any((weights != before[name]).any() for name, weights in weights_of(learner.policy).items())
    for _ in range(BOUND):
        loop.update(all_broken)
    with pytest.raises(TrainingDivergedError, match=r"updates of 3 steps in a row"):
        loop.update(broken(all_broken))
    [file] = loop.settings.run_dir.glob("diverged-*.json")
    assert file.name == "diverged-step-000005.json"
    groups = orjson.loads(file.read_bytes())
    assert [g["group_id"] for g in groups] == [g.group_id for g in GOOD]
