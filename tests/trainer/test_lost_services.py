"""A service that is lost in mid-step leaves a checkpoint in which weights, prompts and records are of one step.

On a full disk the run ends with what went wrong first.
"""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
import structlog
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint.filesystem import FileSystem

from services.clients.data import DataClient
from services.core.errors import EXIT_RECOVERABLE, ConfigurationError, DependencyLostError, exit_code_of
from tests.trainer.rank_jobs import make_learner, weights_of
from tests.trainer.runs import LAST, STEPS, Outside, Run, group, train
from tests.waiting import wait_until
from trainer.checkpoints.run_checkpoints import LEAVE_SNAPSHOT_SECONDS
from trainer.collector import InFlightPrompts
from trainer.config.objective import Objective
from trainer.loop import TrainingLoop
from trainer.model import saving
from trainer.model.ranks import Ranks, join_ranks
from trainer.model.saving import DiskFullError
from trainer.reporting import group_records, run_files


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that loses nothing."""
    outside = Outside("")
    with join_ranks() as ranks:
        run = train(ranks, model, tmp_path_factory.mktemp("undisturbed"), outside)
    assert run.error is None
    assert outside.first == ["write 0", "workers", "publish 0"], "workers may wait for a version"
    return run


@pytest.mark.parametrize(
    ("lost", "completed", "every"),
    [
        ("generate", 1, 0),
        ("draw_replayed", 1, 0),
        ("free_engines_memory", 1, 0),
        ("acknowledge", 2, 0),
        ("publish", 2, 0),
        ("generate", 1, 1),
        ("publish", 2, 1),
    ],
)
def test_weights_prompts_and_records_are_of_one_step(
    alone: Ranks, model: Path, tmp_path: Path, undisturbed: Run, lost: str, completed: int, every: int
) -> None:
    broken = train(alone, model, tmp_path, Outside(lost), checkpoint_every=every)
    loop = broken.loop
    found = loop.rank_calls.checkpoints.newest(loop.state.model_type, loop.state.parameters)
    assert found is not None
    path, state = found
    assert (state.step, state.cursors[""].position, len(state.rewards)) == (completed, completed, completed)
    assert [line["step"] for line in broken.metrics] == list(range(1, completed + 1))

    learner, objective = make_learner(alone, model, STEPS), Objective(loop.settings)
    loop.rank_calls.checkpoints.load(path, learner)
    for step in range(completed + 1, STEPS + 1):
        trained = [objective.training_group(group(f"g{step}", step - 1))]
        learner.update(objective.with_advantages(trained), step - 1)
    weights = weights_of(learner.policy)
    assert all(np.array_equal(value, weights[name]) for name, value in undisturbed.weights.items())


def test_a_run_whose_records_find_no_room_trains_as_before_and_counts_them(
    alone: Ranks, model: Path, tmp_path: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_records, "atomic_write", fail)
    run = train(alone, model, tmp_path, record_groups="all")
    assert run.error is None
    assert run.ends_as(undisturbed)
    assert [line["groups_unrecorded"] for line in run.metrics] == [1.0] * STEPS


def test_a_loss_in_the_evaluation_after_the_last_prompt_leaves_a_checkpoint(
    alone: Ranks, model: Path, tmp_path: Path
) -> None:
    outside = Outside("evaluate", prompts=LAST)
    loop = train(alone, model, tmp_path, outside, eval_prompts=64, checkpoint_every=0).loop
    assert str(outside.error) == "evaluate found nobody"
    assert newest_step(loop) == LAST


def test_evaluations_outside_the_steps_are_in_tensorboard(alone: Ranks, model: Path, tmp_path: Path) -> None:
    loop = train(alone, model, tmp_path, Outside("", prompts=2), eval_prompts=64, eval_every=0, checkpoint_every=0).loop
    directory = loop.settings.run_dir
    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("accuracy")] == [(0, 0.0), (2, 0.5)]
    assert [orjson.loads(line)["step"] for line in (directory / "metrics.jsonl").read_bytes().splitlines()] == [1, 2]


def test_a_setting_that_proves_wrong_in_mid_run_leaves_a_checkpoint(alone: Ranks, model: Path, tmp_path: Path) -> None:
    outside = Outside("generate", kind=ConfigurationError)
    loop = train(alone, model, tmp_path, outside, checkpoint_every=0).loop
    assert str(outside.error) == "generate found nobody"
    assert newest_step(loop) == 1
    assert outside.snapshot_seconds == [LEAVE_SNAPSHOT_SECONDS], "the weights are not kept waiting"


def test_a_version_that_goes_while_groups_are_made_is_written_again(alone: Ranks, model: Path, tmp_path: Path) -> None:
    outside = Outside("", deleted=[2])
    loop = train(alone, model, tmp_path, outside).loop
    assert outside.error is None
    assert loop.state.step == 4
    assert outside.writes == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "last"), [({}, 4), ({"eval_prompts": 64, "eval_every": 1, "target_accuracy": 0.5}, 2)]
)
def test_the_last_step_is_saved_once_and_the_replay_buffer_forgets_what_it_kept_for_removed_checkpoints(
    alone: Ranks, model: Path, tmp_path: Path, settings: dict[str, Any], last: int
) -> None:
    outside = Outside("")
    loop = train(alone, model, tmp_path, outside, **settings).loop
    assert outside.error is None
    assert outside.saved == [f"r-step-{step:06d}" for step in range(1, last + 1)]
    assert outside.forgotten == outside.saved[:-1]
    assert newest_step(loop) == last


# --- a full disk -----------------------------------------------------------------------------------------------------


def fail(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Makes every later write of a record (``fill("records")``) or of checkpoints fail as on a full disk."""

    def broken_stream(*_: Any) -> Any:
        return nullcontext(FullStream())

    def fill_disk(what: str) -> None:
        # The checkpoint of step 1 is written beside the training.
        manifests = [
            tmp_path / "runs/r/checkpoints" / name / "manifest.json" for name in (".step-000001.partial", "step-000001")
        ]
        wait_until(lambda: any(manifest.exists() for manifest in manifests), "the checkpoint of step 1", every=0.01)
        if what == "records":
            monkeypatch.setattr(run_files, "_append", fail)
        else:
            monkeypatch.setattr(FileSystem, "create_stream", broken_stream)
            monkeypatch.setattr(saving.tempfile, "TemporaryFile", fail)

    return fill_disk


full_disk = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""The threads that write a checkpoint end by the error, which the main one then raises."""


class FullStream(io.RawIOBase):
    """A file on a full disk."""

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return 0

    def write(self, _: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def newest_step(loop: TrainingLoop) -> int:
    found = loop.rank_calls.checkpoints.newest(loop.state.model_type, loop.state.parameters)
    assert found is not None
    return found[1].step


@full_disk
def test_a_full_disk_does_not_hide_which_service_was_lost(
    alone: Ranks, model: Path, tmp_path: Path, fill: Callable[[str], None]
) -> None:
    outside = Outside("acknowledge", lambda: fill("checkpoints"))
    with structlog.testing.capture_logs() as logged:
        loop = train(alone, model, tmp_path, outside).loop
    assert str(outside.error) == "acknowledge found nobody"
    [entry] = [entry for entry in logged if entry["event"] == "no checkpoint of the last completed step"]
    assert entry["step"] == LAST
    assert re.search(
        r"the disk is full: .*/checkpoints/\.step-000002\.partial cannot be written, .* GB are", entry["reason"]
    )
    assert [path.name for path in loop.settings.checkpoint_dir.iterdir()] == ["step-000001"], "room was made again"
    assert newest_step(loop) == 1


@full_disk
@pytest.mark.parametrize(("full", "eval_prompts"), [("records", 0), ("checkpoints", 0), ("records", 64)])
def test_a_full_disk_ends_a_run_that_can_be_resumed_with_its_reason(
    alone: Ranks, model: Path, tmp_path: Path, fill: Callable[[str], None], full: str, eval_prompts: int
) -> None:
    outside = Outside("", lambda: fill(full))
    loop = train(alone, model, tmp_path, outside, eval_prompts=eval_prompts, eval_every=LAST).loop
    assert isinstance(outside.error, DiskFullError)
    assert re.search(r"the disk is full: .* cannot be written, .* GB are free there\. Make room", str(outside.error))
    assert newest_step(loop) == 1
    assert exit_code_of(partial(_throw, outside.error)) == EXIT_RECOVERABLE


def _throw(error: Exception) -> None:
    raise error


async def test_a_collector_whose_disk_is_full_ends_as_one_that_may_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.collector.atomic_write", full)
    taken = InFlightPrompts(cast(DataClient, None), tmp_path / "collectors/0.json", "")
    with pytest.raises(DependencyLostError, match=r"collectors/0\.json cannot be written: .*No space left"):
        await taken.take(4)


def test_a_run_ends_at_its_target_accuracy_and_says_what_was_compared(
    alone: Ranks, model: Path, tmp_path: Path
) -> None:
    with structlog.testing.capture_logs() as logs:
        loop = train(alone, model, tmp_path, Outside(""), eval_prompts=64, eval_every=1, target_accuracy=0.5).loop
    assert (loop.state.step, loop.state.best_step) == (2, 2)
    state = loop.state
    assert (state.last_accuracy, state.last_accuracy_low, state.last_accuracy_high) == (0.5, 0.25, 0.75)
    assert state.last_accuracy_prompts == 63
    best = [(line["step"], line["accuracy"]) for line in logs if line["event"] == "best so far"]
    text = "greedy pass@1 of {:.3f} ({:.3f} to {:.3f}) on 63 held-out prompts"
    assert best == [(1, text.format(0.25, 0.125, 0.625)), (2, text.format(0.5, 0.25, 0.75))]
    [reached] = [line for line in logs if line["event"] == "TARGET_ACCURACY reached"]
    assert (reached["target"], reached["best"]) == (0.5, 0.5)
