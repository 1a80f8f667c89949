"""Settings change between two steps of a run, on all ranks, and what resumes, forks or recomputes it repeats that."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
import torch

from local_runner.fork import Fork
from services.core.errors import ConfigurationError
from services.protocol.prompts import DataStats
from services.run_page.directory import Run as Files
from tests.trainer.processes import run_on_ranks
from tests.trainer.rank_jobs import Arrays, make_learner, weights_of
from tests.trainer.test_fork import Prompts
from trainer.checkpoints.checkpoint import CheckpointStore
from trainer.config import TrainerSettings
from trainer.config.changes import CHANGEABLE, Request, changed, changes_of, write_request
from trainer.explain import verify
from trainer.loop import TrainingLoop
from trainer.model.ranks import Ranks
from trainer.rank_calls import RankCalls
from trainer.reporting.group_records import GroupRecords
from trainer.reporting.run_files import RunFiles
from trainer.reporting.status import RunStatus
from trainer.run_checkpoints import resume
from trainer.service_calls import ServiceCalls

pytestmark = pytest.mark.leaving

STEPS = 6
SETTINGS: dict[str, Any] = {
    "eval_prompts": 0,
    "checkpoint_every": 0,
    "keep_checkpoints_every": 3,
    "record_groups": "all",
    "updates_per_batch": 1,
    "learning_rate": 1e-3,
}
Requests = dict[int, dict[str, Any]]


class KilledError(Exception):
    """Ends the trainer without a checkpoint, as SIGKILL does."""


class Asked(Prompts):
    """Makes requests for changes during the steps of ``requests``, and kills the trainer in step ``killed``."""

    def __init__(self, run_dir: Path, requests: Requests, killed: int) -> None:
        super().__init__("", prompts=STEPS + 2)
        self.run_dir, self.requests, self.killed = run_dir, requests, killed

    def generate_and_score(self, *arguments: Any) -> list[Any]:
        if self.steps + 1 == self.killed:
            raise KilledError
        return super().generate_and_score(*arguments)

    def acknowledge(self, _: dict[str, float]) -> None:
        if values := self.requests.get(self.steps):
            write_request(self.run_dir, values)


def train(
    ranks: Ranks,
    model: Path,
    directory: Path,
    run_id: str,
    requests: Requests | None = None,
    killed: int = 0,
    **settings: Any,
) -> Arrays:
    """Train from the newest checkpoint, if any, to the end or to a kill; return all weights."""
    torch.manual_seed(5)
    learner = make_learner(ranks, model, STEPS, shared_dir=directory, run_id=run_id, **(SETTINGS | settings))
    checkpoints = CheckpointStore(learner.settings.checkpoint_dir, 9, ranks, 3)
    data = DataStats(source="walks", train_prompts=4 * STEPS, test_prompts=1, refused={})
    state = resume(learner.settings, ranks, learner.policy, data, learner, checkpoints)
    outside = Asked(learner.settings.run_dir, requests or {}, killed)
    outside.steps = state.cursors[""].position if state.cursors else 0
    rank_calls = RankCalls(learner.settings, ranks, learner, cast(Any, outside), checkpoints, lambda: False)
    if not ranks.is_main:
        rank_calls.follow()
        return weights_of(learner.policy)
    files = RunFiles(learner.settings, state.step, str)
    total = learner.settings.max_steps or STEPS
    services, n_prompts = cast(ServiceCalls, outside), 4.0 * (STEPS + 2)
    loop = TrainingLoop(learner.settings, services, rank_calls, files, RunStatus(), state, total, n_prompts)
    loop.publisher.publish = outside.publish  # type: ignore[method-assign]
    try:
        with rank_calls.leading():
            loop.run()
        ends = {"accuracy_before": None, "accuracy_after": None, "accuracy_after_step": None}
        files.write_summary({"status": "succeeded"} | ends)
    except KilledError:
        checkpoints.finish()
    files.close()
    return weights_of(learner.policy)


def equal(mine: Arrays, theirs: Arrays) -> bool:
    return all(np.array_equal(mine[name], theirs[name]) for name in theirs)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


def test_the_learner_takes_a_new_learning_rate_at_the_next_step_to_the_bit(
    alone: Ranks, model: Path, tmp_path: Path
) -> None:
    changed_weights = train(alone, model, tmp_path, "set", {3: {"learning_rate": "5e-3"}})
    # The same by a start: three steps, and the others from their checkpoint with another rate.
    train(alone, model, tmp_path, "started", killed=4)
    assert equal(train(alone, model, tmp_path, "started", learning_rate=5e-3), changed_weights)
    assert not equal(train(alone, model, tmp_path, "unchanged"), changed_weights)
    run_dir = tmp_path / "runs/set"
    assert [line["learning_rate"] for line in lines(run_dir)] == [1e-3] * 3 + [5e-3] * 3
    [change] = changes_of(run_dir)
    assert (change.step, change.values, change.launched) == (4, {"learning_rate": 5e-3}, {"learning_rate": 1e-3})
    config = orjson.loads((run_dir / "config.json").read_bytes())["components"]["ppo-trainer"]
    assert config["settings"]["learning_rate"] == 5e-3
    assert not list((run_dir / "requests").iterdir())


CHANGED: dict[str, dict[str, Any]] = {
    "entropy": {"entropy_coef": 0.5},
    "schedule": {"lr_schedule": "linear"},
    "clip": {"max_grad_norm": 1e-3},
    "mask": {"off_policy_max_kl": 1e-6},
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_a_learner_holds_follows_a_change_as_a_start_would(
    alone: Ranks, model: Path, tmp_path: Path, name: str
) -> None:
    by_set = train(alone, model, tmp_path, "set", {3: CHANGED[name]})
    train(alone, model, tmp_path, "started", killed=4)
    assert equal(train(alone, model, tmp_path, "started", **CHANGED[name]), by_set)
    assert not equal(train(alone, model, tmp_path, "unchanged"), by_set)


# A change from step 2 on is in the checkpoint of step 3; one from step 5 on comes after it.
@pytest.mark.parametrize("during", [1, 4])
def test_a_killed_run_repeats_a_change_at_its_step_to_the_bit(
    alone: Ranks, model: Path, tmp_path: Path, during: int
) -> None:
    requests = {during: {"learning_rate": 5e-3, "entropy_coef": 0.1}}
    expected = train(alone, model, tmp_path, "whole", requests)
    train(alone, model, tmp_path, "killed", requests, killed=6)
    assert [path.name for path in sorted((tmp_path / "runs/killed/checkpoints").iterdir())] == ["step-000003"]
    assert equal(train(alone, model, tmp_path, "killed"), expected)
    assert [line["learning_rate"] for line in lines(tmp_path / "runs/killed")] == [1e-3] * during + [5e-3] * (
        6 - during
    )


def test_a_request_that_no_step_has_taken_outlives_a_kill(alone: Ranks, model: Path, tmp_path: Path) -> None:
    train(alone, model, tmp_path, "r", killed=5)
    write_request(tmp_path / "runs/r", {"learning_rate": 5e-3})
    train(alone, model, tmp_path, "r")
    assert [change.step for change in changes_of(tmp_path / "runs/r")] == [4], "the first step after the checkpoint"


def test_a_start_with_another_value_replaces_a_change_and_one_with_the_old_value_does_not(
    alone: Ranks, model: Path, tmp_path: Path
) -> None:
    train(alone, model, tmp_path, "r", {1: {"learning_rate": 5e-3, "entropy_coef": 0.1}}, killed=5)
    train(alone, model, tmp_path, "r", learning_rate=2e-3)
    heads = [GroupRecords(tmp_path / "runs/r").head(step).settings for step in range(1, 7)]
    assert [head["learning_rate"] for head in heads] == [1e-3, 5e-3, 5e-3, 2e-3, 2e-3, 2e-3]
    assert [head.get("entropy_coef") for head in heads] == [None] + [0.1] * 5


def test_a_start_that_a_change_does_not_fit_names_the_record_of_changes(
    alone: Ranks, model: Path, tmp_path: Path
) -> None:
    train(alone, model, tmp_path, "r", {1: {"dual_clip": 3.0}}, killed=3)
    with pytest.raises(
        ConfigurationError, match=r"r/changes\.jsonl has a change for step 2 that does not fit .*DUAL_CLIP"
    ):
        train(alone, model, tmp_path, "r", loss="cispo")


def test_fewer_and_more_steps_end_the_run_earlier_and_later(alone: Ranks, model: Path, tmp_path: Path) -> None:
    train(alone, model, tmp_path, "fewer", {2: {"max_steps": 4}})
    assert len(lines(tmp_path / "runs/fewer")) == 4
    train(alone, model, tmp_path, "more", {2: {"max_steps": 7, "lr_schedule": "linear"}})
    rates = [line["learning_rate"] for line in lines(tmp_path / "runs/more")]
    assert rates == pytest.approx([1e-3, 1e-3, *(1e-3 * (1 - step / 7) for step in range(2, 7))])


def test_every_step_is_verified_with_the_settings_that_it_had(alone: Ranks, model: Path, tmp_path: Path) -> None:
    requests: Requests = {1: {"learning_rate": 5e-3}, 2: {"entropy_coef": 0.1}, 4: {"learning_rate": 1e-4}}
    train(alone, model, tmp_path, "r", requests)
    compared = verify(tmp_path / "runs/r", 0, alone)
    assert [(one.first, one.last, one.step) for one in compared] == [(1, 3, None), (4, 6, None)]
    assert min(one.tensors or 0 for one in compared) > 20


@pytest.mark.parametrize(
    ("at", "changes", "expected"),
    [
        (3, [], [1e-3, 5e-3, 5e-3, 5e-3, 5e-3, 5e-3]),  # the later change is not repeated
        (6, [], [1e-3, 5e-3, 5e-3, 5e-3, 2e-3, 2e-3]),
        (3, ["LEARNING_RATE=1e-3"], [1e-3, 5e-3, 5e-3, 1e-3, 1e-3, 1e-3]),
    ],
)
def test_a_fork_has_the_changes_up_to_its_step(
    alone: Ranks, model: Path, tmp_path: Path, at: int, changes: list[str], expected: list[float]
) -> None:
    requests: Requests = {1: {"learning_rate": 5e-3}, 4: {"learning_rate": 2e-3}}
    train(alone, model, tmp_path, "base", requests)
    fork = Fork(Files(tmp_path / "runs/base"), at, changes, "fork")
    fork.check()
    fork.write()
    train(alone, model, tmp_path, "fork")
    assert [line["learning_rate"] for line in lines(fork.new)] == expected
    again = Fork(Files(fork.new), 6, [], "again")
    again.write()
    train(alone, model, tmp_path, "again", max_steps=7)
    assert lines(again.new)[-1]["learning_rate"] == expected[-1], "a fork's fork has them, too"


def train_two(ranks: Ranks, model: Path, directory: Path) -> Arrays:
    return train(ranks, model, directory, "two", {3: {"learning_rate": 5e-3, "entropy_coef": 0.1}})


@pytest.mark.slow
def test_two_ranks_change_their_settings_at_the_same_step(model: Path, tmp_path: Path) -> None:
    first, second = run_on_ranks(2, train_two, model, tmp_path)
    assert equal(first, second)
    assert [line["learning_rate"] for line in lines(tmp_path / "runs/two")] == [1e-3] * 3 + [5e-3] * 3


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "start": ({}, {"batch_size": 8}, "BATCH_SIZE cannot change while a run runs: models, optimizers, collectors or"),
    "reference": ({}, {"kl_coef": 0.1}, "KL_COEF cannot change .* a reference model only if it started with KL_COEF"),
    "no reference": ({"kl_coef": 0.1}, {"kl_coef": 0}, "KL_COEF cannot change while a run runs: it is 0.1"),
    "services": ({"method": "sft"}, {"eval_every": 5}, "EVAL_EVERY cannot change .*rollout-server.* have to start"),
    "type": ({}, {"learning_rate": "fast"}, "LEARNING_RATE is 'fast': Input should be a valid number"),
    "range": ({}, {"learning_rate": -1}, "LEARNING_RATE is -1: Input should be greater than 0"),
    "check": ({"loss": "sapo"}, {"clip_low": 0.1}, "CLIP_LOW has no effect with LOSS=sapo; unset it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_changes_are_refused_with_their_reason(tmp_path: Path, name: str) -> None:
    record, values, reason = REFUSED[name]
    with pytest.raises(ConfigurationError, match=reason):
        changed(tmp_path / "runs/r", record, values)


def test_the_trainer_refuses_what_it_cannot_take_and_trains_on(alone: Ranks, model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs/r"

    (run_dir / "requests").mkdir(parents=True)
    (run_dir / "requests/0.json").write_text("{")
    requests: Requests = {2: {"max_steps": 2}, 3: {"seed": 5}, 4: {"learning_rate": 5e-3}}
    train(alone, model, tmp_path, "r", requests)
    refusals = [
        Request.model_validate_json(path.read_bytes()).refusal for path in sorted((run_dir / "requests").iterdir())
    ]
    assert [refusal.partition(";")[0].partition(":")[0] for refusal in refusals] == [
        "1 validation error for Request\n  Invalid JSON",
        "MAX_STEPS is 2, but step 2 is complete",
        "SEED cannot change while a run runs",
    ]
    assert [change.step for change in changes_of(run_dir)] == [5]


def test_settings_that_change_are_settings() -> None:
    assert set(CHANGEABLE) < set(TrainerSettings.model_fields)
