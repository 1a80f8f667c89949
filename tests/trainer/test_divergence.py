"""Updates that are not finite are skipped; too many in a row end the run, with the batch kept for inspection."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import orjson
import pytest

from tests.sequences import changed
from tests.trainer.rank_jobs import make_learner, run_state, weights_of
from tests.trainer.tiny import FAMILIES, random_groups, save_model
from trainer.algorithm.packing import TrainingGroup
from trainer.loop import TrainingLoop
from trainer.model.ranks import Ranks, join_ranks
from trainer.rank_calls import RankCalls, TrainingDivergedError
from trainer.reporting.run_files import RunFiles

GOOD = random_groups(seed=1)
BOUND = 2


def broken(groups: list[TrainingGroup]) -> list[TrainingGroup]:
    first, *others = groups
    sequences = [changed(s, logprobs=[math.nan] * s.tokens) for s in first.sequences]
    return [replace(first, sequences=sequences), *others]


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A training loop of which only the update is used."""
    monkeypatch.setattr("trainer.loop.MAX_SKIPPED_STEPS", BOUND)
    model = save_model(tmp_path / "model", FAMILIES["qwen2"])
    with join_ranks() as ranks:
        yield make_loop(ranks, model, tmp_path)


def make_loop(ranks: Ranks, model: Path, directory: Path, **settings: Any) -> TrainingLoop:
    learner = make_learner(ranks, model, shared_dir=directory, run_id="r", **settings)
    files = RunFiles(learner.settings, 0, str)
    unused: Any = MagicMock()
    rank_calls = RankCalls(learner.settings, ranks, learner, unused, unused, lambda: False)
    return TrainingLoop(
        learner.settings, unused, rank_calls, files, unused, run_state(learner, 4), learner.total_steps, 40
    )


def test_a_run_goes_on_after_updates_that_were_skipped(loop: TrainingLoop) -> None:
    before = weights_of(loop.rank_calls.learner.policy)
    for _ in range(3):
        for _ in range(BOUND):
            assert loop.update(broken(GOOD)).skipped == 1
        assert loop.update(GOOD).skipped == 0
    after = weights_of(loop.rank_calls.learner.policy)
    assert any((after[name] != before[name]).any() for name in before)


def test_too_many_in_a_row_end_it_with_the_batch_in_a_file(loop: TrainingLoop) -> None:
    for _ in range(BOUND):
        loop.update(broken(GOOD))
    with pytest.raises(TrainingDivergedError, match=r"updates of 3 steps in a row .*allowed are 2.*LEARNING_RATE"):
        loop.update(broken(GOOD))
    [file] = loop.settings.run_dir.glob("diverged-*.json")
    assert file.name == "diverged-step-000005.json"
    groups = orjson.loads(file.read_bytes())
    assert [g["group_id"] for g in groups] == [g.group_id for g in GOOD]
    assert groups[1]["sequences"][0]["logprobs"] == GOOD[1].sequences[0].logprobs.tolist()


def test_a_step_counts_once_however_many_updates_it_has(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.loop.MAX_SKIPPED_STEPS", BOUND)
    model = save_model(tmp_path / "model", FAMILIES["qwen2"])
    loop = make_loop(alone, model, tmp_path, updates_per_batch=4, importance_correction="none")
    all_broken = [broken([group])[0] for group in GOOD]
    for _ in range(BOUND):
        assert loop.update(all_broken).skipped == 4
    assert loop.update(broken(GOOD)).skipped == 1, "the others were taken, so the count begins anew"
    for _ in range(BOUND):
        loop.update(all_broken)
    with pytest.raises(TrainingDivergedError, match="updates of 3 steps"):
        loop.update(all_broken)
