"""A service that is lost in mid-step leaves a checkpoint in which weights, prompts and records are of one step.

On a full disk the run ends with what went wrong first.
"""

from __future__ import annotations

import errno
import io
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
import structlog
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint.filesystem import FileSystem

from services.clients.data import DataClient
from services.core.errors import EXIT_RECOVERABLE, ConfigurationError, DependencyLostError, exit_code_of
from services.protocol.groups import Group, TokenSequence
from services.protocol.prompts import Cursor
from services.protocol.rewards import FinishReason, RewardResult, RewardStatus
from tests.sequences import make_group
from tests.trainer.rank_jobs import make_learner, run_state, weights_of
from tests.trainer.tiny import FAMILIES, save_model
from trainer.checkpoints.checkpoint import CheckpointStore
from trainer.collector import InFlightPrompts
from trainer.config.objective import Objective
from trainer.loop import TrainingLoop
from trainer.model import saving
from trainer.model.ranks import Ranks
from trainer.model.saving import DiskFullError
from trainer.rank_calls import RankCalls
from trainer.reporting import group_records, run_files
from trainer.reporting.group_records import GroupRecords
from trainer.reporting.run_files import RunFiles
from trainer.reporting.status import RunStatus
from trainer.rollouts.batch import Batch
from trainer.run_checkpoints import LEAVE_SNAPSHOT_SECONDS
from trainer.service_calls import ServiceCalls

LAST = 2
"""The step in which a service is lost."""


class Outside:
    """All that is outside the trainer: hands out groups, and loses a service in one call of step LAST.

    In ``acknowledge`` of that step, ``happens`` is called before.
    """

    def __init__(
        self,
        lost: str,
        happens: Callable[[], None] = lambda: None,
        deleted: Sequence[int] = (),
        prompts: int = 4,
        kind: type[Exception] = DependencyLostError,
    ) -> None:
        """``deleted`` are versions that go from the shared volume as soon as they are published."""
        self.lost = lost
        self.deleted = deleted
        self.prompts = prompts
        self.kind = kind
        self.happens = happens
        self.error: Exception | None = None
        self.steps = 0
        self.saved: list[str] = []
        self.snapshot_seconds: list[float | None] = []
        self.forgotten: list[str] = []
        self.writes: list[int] = []
        """Versions, each time that one is written."""
        self.on_gpus = None
        self.written = 0
        self.thread = None
        self.first: list[str] = []
        """The calls before the first step, in order."""
        self.samples: list[dict[str, Any]] = []
        self.failure: str | None = None
        self.evaluator = self

    @property
    def cursors(self) -> dict[str, Cursor]:
        return {"": Cursor(epoch=0, position=self.steps)}

    def fetch_prompts(self, _wanted: int) -> list[Any]:
        return [None] if self.steps < self.prompts else []

    def generate_and_score(self, _prompts: Any, _batch: Batch, meanwhile: Callable[[], None]) -> list[Group]:
        meanwhile()
        self._reach("generate", self.steps + 1)
        self.steps += 1
        return [group(f"g{self.steps}", self.steps - 1)]

    def store(self, _batch: Batch) -> None:
        pass

    def draw_replayed(self, *_: Any) -> None:
        self._reach("draw_replayed", self.steps)

    def free_engines_memory(self) -> None:
        self._reach("free_engines_memory", self.steps)

    def acknowledge(self, _: dict[str, float]) -> None:
        if self.steps == LAST:
            self.happens()
        self._reach("acknowledge", self.steps)

    def save_replay(self, label: str, deadline: float | None = None) -> None:
        self.saved.append(label)
        self.snapshot_seconds.append(deadline)

    def forget_replay(self, label: str, deadline: float | None = None) -> None:
        self.forgotten.append(label)

    def wait_for_workers(self) -> None:
        self.first.append("workers")

    def write(self, version: int) -> None:
        self.writes.append(version)
        self.written = version
        if not self.steps:
            self.first.append(f"write {version}")

    def is_on_volume(self, version: int) -> bool:
        return version == 0 or version in self.writes

    def publish(self, version: int) -> dict[str, float]:
        if not version:
            self.first.append("publish 0")
        else:
            if version not in self.deleted:
                self.writes.append(version)
            self.written = version
            self._reach("publish", self.steps)
        return {}

    def evaluate(self) -> dict[str, float]:
        self._reach("evaluate", self.steps)
        accuracy = min(1.0, 0.25 * self.steps)
        ends = {"accuracy_low": accuracy / 2, "accuracy_high": accuracy / 2 + 0.5}
        return {"accuracy": accuracy, **ends, "eval_prompts": 64.0, "eval_left_out": 1.0}

    def statistics(self) -> dict[str, float]:
        return {}

    def _reach(self, call: str, step: int) -> None:
        if call == self.lost and step == LAST:
            raise self.kind(f"{call} found nobody")


def group(name: str, version: int) -> Group:
    experiences = [
        TokenSequence(
            completion="x",
            completion_ids=[5 + number, 6],
            logprobs=[-2.0, -2.0],
            policy_versions=[version] * 2,
            finish_reason=FinishReason.STOP,
            result=RewardResult(reward=float(number), status=RewardStatus.SCORED),
        )
        for number in range(2)
    ]
    return make_group(group_id=name, id=name, prompt="1+1=", ground_truth="2", prompt_ids=[2, 3], sequences=experiences)


def train(ranks: Ranks, directory: Path, outside: Outside, **settings: Any) -> TrainingLoop:
    """Trains until a service is lost, or to the end."""
    model = save_model(directory / "model", FAMILIES["qwen2"])
    options: dict[str, Any] = {"eval_prompts": 0, "checkpoint_every": 1, "checkpoints_kept": 1} | settings
    learner = make_learner(ranks, model, 4, shared_dir=directory, run_id="r", **options)
    checkpoints = CheckpointStore(learner.settings.checkpoint_dir, learner.settings.checkpoints_kept, ranks)
    state = run_state(learner, 0).model_copy(update={"cursors": {}})
    files = RunFiles(learner.settings, 0, str)
    rank_calls = RankCalls(learner.settings, ranks, learner, cast(Any, outside), checkpoints, lambda: False)
    loop = TrainingLoop(learner.settings, cast(ServiceCalls, outside), rank_calls, files, RunStatus(), state, 4, 16)
    loop.publisher.publish = outside.publish  # type: ignore[method-assign]
    try:
        with rank_calls.leading():
            loop.run()
    except (DependencyLostError, ConfigurationError) as error:
        outside.error = error
    files.close()
    return loop


@pytest.mark.parametrize(
    ("lost", "completed"),
    [("generate", 1), ("draw_replayed", 1), ("free_engines_memory", 1), ("acknowledge", 2), ("publish", 2)],
)
@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_weights_prompts_and_records_are_of_one_step(
    alone: Ranks, tmp_path: Path, lost: str, completed: int, checkpoint_every: int
) -> None:
    broken = train(alone, tmp_path / "broken", Outside(lost), checkpoint_every=checkpoint_every)
    nothing_lost = Outside("")
    undisturbed = train(alone, tmp_path / "undisturbed", nothing_lost)
    assert nothing_lost.error is None
    assert nothing_lost.first == ["write 0", "workers", "publish 0"], "workers may wait for a version"
    found = broken.rank_calls.checkpoints.newest(broken.state.model_type, broken.state.parameters)
    assert found is not None
    path, state = found
    assert (state.step, state.cursors[""].position, len(state.rewards)) == (completed, completed, completed)
    metrics = (broken.settings.run_dir / "metrics.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["step"] for line in metrics] == list(range(1, completed + 1))

    learner = make_learner(alone, tmp_path / "broken" / "model", 4)
    broken.rank_calls.checkpoints.load(path, learner.policy, learner.optimizer)
    for step in range(completed + 1, 5):
        trained = [Objective(broken.settings).training_group(group(f"g{step}", step - 1))]
        learner.update(Objective(broken.settings).with_advantages(trained), step - 1)
    expected = weights_of(undisturbed.rank_calls.learner.policy)
    assert all(np.array_equal(value, expected[name]) for name, value in weights_of(learner.policy).items())


def test_a_step_is_computed_again_to_the_bit_from_its_record_and_the_checkpoint_before_it(
    alone: Ranks, tmp_path: Path
) -> None:
    loop = train(alone, tmp_path, Outside(""), record_groups="all", checkpoints_kept=4, lr_schedule="linear")
    records = GroupRecords(loop.settings.run_dir)
    assert records.steps == [1, 2, 3, 4]
    objective = Objective(loop.settings)
    for step in (2, 3, 4):
        head = records.head(step)
        recorded = {name: value for name, value in head.settings.items() if name != "model_name"}
        learner = make_learner(alone, tmp_path / "model", head.total_steps, **recorded)
        before, after = (loop.settings.checkpoint_dir / f"step-{number:06d}" for number in (step - 1, step))
        loop.rank_calls.checkpoints.load(before, learner.policy, learner.optimizer)
        groups = [
            objective.training_group(r.group, weight=r.weight, is_replayed=r.is_replayed) for r in records.groups(step)
        ]
        learner.update(objective.with_advantages(groups), step - 1, position=head.position)
        computed = weights_of(learner.policy)
        loop.rank_calls.checkpoints.load(after, learner.policy, learner.optimizer)
        assert all(np.array_equal(value, computed[name]) for name, value in weights_of(learner.policy).items())


def test_a_run_whose_records_find_no_room_trains_as_before_and_counts_them(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = train(alone, tmp_path / "undisturbed", Outside(""), record_groups="off")
    monkeypatch.setattr(group_records, "atomic_write", fail)
    outside = Outside("")
    loop = train(alone, tmp_path, outside, record_groups="all")
    assert outside.error is None
    expected = weights_of(undisturbed.rank_calls.learner.policy)
    assert all(
        np.array_equal(value, expected[name]) for name, value in weights_of(loop.rank_calls.learner.policy).items()
    )
    lines = [orjson.loads(line) for line in (loop.settings.run_dir / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["groups_unrecorded"] for line in lines] == [1.0] * 4


def test_a_loss_in_the_evaluation_after_the_last_prompt_leaves_a_checkpoint(alone: Ranks, tmp_path: Path) -> None:
    outside = Outside("evaluate", prompts=LAST)
    loop = train(alone, tmp_path, outside, eval_prompts=64, checkpoint_every=0)
    assert str(outside.error) == "evaluate found nobody"
    assert newest_step(loop) == LAST


def test_evaluations_outside_the_steps_are_in_tensorboard_and_in_the_curve(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = train(alone, tmp_path, Outside("", prompts=2), eval_prompts=64, eval_every=0, checkpoint_every=0)
    directory, state = loop.settings.run_dir, loop.state
    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("accuracy")] == [(0, 0.0), (2, 0.5)]
    assert [orjson.loads(line)["step"] for line in (directory / "metrics.jsonl").read_bytes().splitlines()] == [1, 2]

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    summary = {"status": "failed", "accuracy_before": state.accuracy_before, "accuracy_after": state.last_accuracy}
    loop.files.write_summary(summary | {"accuracy_after_step": state.evaluated_step})
    _, accuracies = drawn[0].axes[0].lines
    assert accuracies.get_xydata().tolist() == [[0.0, 0.0], [2.0, 0.5]]


def test_a_setting_that_proves_wrong_in_mid_run_leaves_a_checkpoint(alone: Ranks, tmp_path: Path) -> None:
    outside = Outside("generate", kind=ConfigurationError)
    loop = train(alone, tmp_path, outside, checkpoint_every=0)
    assert str(outside.error) == "generate found nobody"
    assert newest_step(loop) == 1
    assert outside.snapshot_seconds == [LEAVE_SNAPSHOT_SECONDS], "the weights are not kept waiting"


def test_a_run_that_is_lost_before_its_first_step_took_time_too(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> None:
        raise DependencyLostError("no worker")

    outside = Outside("")
    monkeypatch.setattr(outside, "wait_for_workers", nobody)
    assert train(alone, tmp_path, outside).state.seconds > 0
    assert str(outside.error) == "no worker"


def test_a_version_that_goes_while_groups_are_made_is_written_again(alone: Ranks, tmp_path: Path) -> None:
    outside = Outside("", deleted=[2])
    loop = train(alone, tmp_path, outside)
    assert outside.error is None
    assert loop.state.step == 4
    assert outside.writes == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "last"),
    [({"checkpoint_every": 1}, 4), ({"eval_prompts": 64, "eval_every": 1, "target_accuracy": 0.5}, 2)],
)
def test_the_last_step_is_saved_once(alone: Ranks, tmp_path: Path, settings: dict[str, Any], last: int) -> None:
    outside = Outside("")
    loop = train(alone, tmp_path, outside, **settings)
    assert outside.error is None
    assert outside.saved == [f"r-step-{step:06d}" for step in range(1, last + 1)]
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
        wait_for_checkpoint(tmp_path / "runs" / "r" / "checkpoints")
        if what == "records":
            monkeypatch.setattr(run_files, "_append", fail)
        else:
            monkeypatch.setattr(FileSystem, "create_stream", broken_stream)
            monkeypatch.setattr(saving.tempfile, "TemporaryFile", fail)

    return fill_disk


def wait_for_checkpoint(directory: Path) -> None:
    """Returns when the checkpoint of step 1 has been written beside the training."""
    end = time.monotonic() + 60
    while not any((directory / name / "manifest.json").exists() for name in (".step-000001.partial", "step-000001")):
        assert time.monotonic() < end
        time.sleep(0.01)


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


def test_a_full_disk_does_not_hide_which_service_was_lost(
    alone: Ranks, tmp_path: Path, fill: Callable[[str], None]
) -> None:
    outside = Outside("acknowledge", lambda: fill("checkpoints"))
    with structlog.testing.capture_logs() as logged:
        loop = train(alone, tmp_path, outside)
    assert str(outside.error) == "acknowledge found nobody"
    [entry] = [entry for entry in logged if entry["event"] == "no checkpoint of the last completed step"]
    assert entry["step"] == LAST
    assert re.search(
        r"the disk is full: .*/checkpoints/\.step-000002\.partial cannot be written, .* GB are", entry["reason"]
    )
    assert [path.name for path in loop.settings.checkpoint_dir.iterdir()] == ["step-000001"], "room was made again"
    assert newest_step(loop) == 1


@pytest.mark.parametrize(("full", "eval_prompts"), [("records", 0), ("checkpoints", 0), ("records", 64)])
def test_a_full_disk_ends_a_run_that_can_be_resumed_with_its_reason(
    alone: Ranks, tmp_path: Path, fill: Callable[[str], None], full: str, eval_prompts: int
) -> None:
    outside = Outside("", lambda: fill(full))
    loop = train(alone, tmp_path, outside, eval_prompts=eval_prompts, eval_every=LAST)
    assert isinstance(outside.error, DiskFullError)
    assert re.search(r"the disk is full: .* cannot be written, .* GB are free there\. Make room", str(outside.error))
    assert newest_step(loop) == 1
    assert exit_code_of(partial(_throw, outside.error)) == EXIT_RECOVERABLE


def _throw(error: Exception) -> None:
    raise error


def test_the_replay_buffer_forgets_what_it_kept_for_removed_checkpoints(alone: Ranks, tmp_path: Path) -> None:
    outside = Outside("")
    train(alone, tmp_path, outside)
    assert outside.forgotten == ["r-step-000001", "r-step-000002", "r-step-000003"], "not that of the newest checkpoint"


def test_it_forgets_also_what_the_checkpoint_of_an_interrupted_run_takes_the_place_of(
    alone: Ranks, tmp_path: Path
) -> None:
    outside = Outside("publish")
    train(alone, tmp_path, outside, checkpoint_every=LAST + 1)
    assert outside.forgotten == []
    outside = Outside("publish")
    train(alone, tmp_path / "other", outside)
    assert outside.saved == ["r-step-000001", "r-step-000002"]
    assert outside.forgotten == ["r-step-000001"]


async def test_a_collector_whose_disk_is_full_ends_as_one_that_may_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.collector.atomic_write", full)
    taken = InFlightPrompts(cast(DataClient, None), tmp_path / "collectors/0.json", "")
    with pytest.raises(DependencyLostError, match=r"collectors/0\.json cannot be written: .*No space left"):
        await taken.take(4)


def test_a_run_ends_at_its_target_accuracy_and_says_what_was_compared(tmp_path: Path, alone: Ranks) -> None:
    with structlog.testing.capture_logs() as logs:
        loop = train(alone, tmp_path, Outside(""), eval_prompts=64, eval_every=1, target_accuracy=0.5)
    assert (loop.state.step, loop.state.best_step) == (2, 2)
    state = loop.state
    assert (state.last_accuracy, state.last_accuracy_low, state.last_accuracy_high) == (0.5, 0.25, 0.75)
    assert state.last_accuracy_prompts == 63
    best = [(line["step"], line["accuracy"]) for line in logs if line["event"] == "best so far"]
    text = "greedy pass@1 of {:.3f} ({:.3f} to {:.3f}) on 63 held-out prompts"
    assert best == [(1, text.format(0.25, 0.125, 0.625)), (2, text.format(0.5, 0.25, 0.75))]
    [reached] = [line for line in logs if line["event"] == "TARGET_ACCURACY reached"]
    assert (reached["target"], reached["best"]) == (0.5, 0.5)
