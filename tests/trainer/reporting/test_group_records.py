"""The record of the groups that each step trained on, and what a resumed or a damaged run has of it."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.core.errors import ConfigurationError
from services.protocol.groups import Group
from tests.sequences import make_group, trained_sequence
from trainer.algorithm.packing import TrainingGroup
from trainer.checkpoints.state import Computation
from trainer.config import TrainerSettings
from trainer.reporting import group_records
from trainer.reporting.group_records import GroupRecorder, GroupRecords

BATCH = 3
LAST = 20


def fresh_group(step: int, number: int) -> Group:
    draw = random.Random(100 * step + number)
    sequences = [
        trained_sequence(
            [draw.randrange(99) for _ in range(4)],
            [-draw.random() for _ in range(4)],
            loss_mask=[True, False, True, True],
            reward=draw.random(),
            arrays={"values": [draw.random() for _ in range(4)]},
        )
        for _ in range(2)
    ]
    return make_group(
        group_id=f"{step}-{number}", sequences=sequences, row=b'{"question": 1}', source="gsm8k", prompt_ids=[7, 8]
    )


def batch(step: int, staleness: int) -> tuple[list[TrainingGroup], list[Group]]:
    """Return the fresh groups of a step, and after them a few replayed ones, as the loss sees them and as made."""
    draw = random.Random(step)
    fresh = [fresh_group(step, number) for number in range(BATCH)]
    earlier = [(s, number) for s in range(max(1, step - staleness), step) for number in range(BATCH)]
    replayed = [fresh_group(*place) for place in draw.sample(earlier, min(2, len(earlier)))]
    trained = [TrainingGroup(g.prompt_ids, g.sequences, g.group_id) for g in fresh]
    trained += [TrainingGroup(g.prompt_ids, g.sequences, g.group_id, draw.random(), is_replayed=True) for g in replayed]
    return trained, [*replayed, *fresh]


def settings(directory: Path, kept: Any, staleness: int = 4, **given: Any) -> TrainerSettings:
    options = {"replay_groups": 2, "replay_max_staleness": staleness, "record_groups": kept} | given
    chosen = TrainerSettings.load(shared_dir=directory, run_id="r", **options)
    chosen.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    return chosen


def has_room(_size: int) -> bool:
    return True


def fields_of(step: int) -> dict[str, Any]:
    """Return the fields of a step's head that its groups do not have."""
    machine = {"device": "cpu", "processor": "AVX2", "threads": 1, "compute_type": "float32"}
    packages = {"torch": "2", "transformers": "5"}
    computation = Computation.model_validate({"ranks": 1, "replicas": 1, **machine, **packages})
    progress = {"policy_version": step - 1, "position": step - 0.5, "total_steps": LAST}
    return {**progress, "tokenizer": "digest", "computation": computation}


def write(recorder: GroupRecorder, step: int, staleness: int = 4) -> int:
    return recorder.write(step, *batch(step, staleness), **fields_of(step))


def run(directory: Path, kept: Any, steps: Sequence[int], every: int = 5, staleness: int = 4) -> None:
    """Record steps, with a checkpoint every so many, as a run does that resumes before the first of them."""
    chosen = settings(directory, kept, staleness)
    recorder = GroupRecorder(chosen, steps[0] - 1, has_room)
    for step in steps:
        write(recorder, step, staleness)
        if every and step % every == 0:
            (chosen.checkpoint_dir / f"step-{step:06d}").mkdir(exist_ok=True)
    recorder.prune()


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "runs" / "r" / "groups").iterdir()}


@pytest.mark.parametrize("kept", ["all", 3, 12])
def test_the_kept_steps_have_their_groups_in_order_and_to_the_bit(tmp_path: Path, kept: Any) -> None:
    run(tmp_path, kept, range(1, LAST + 1))
    records = GroupRecords(tmp_path / "runs" / "r")
    wanted = range(1, LAST + 1) if kept == "all" else range(LAST - kept + 1, LAST + 1)
    assert set(wanted) <= set(records.steps)
    for step in records.steps:
        trained, made = batch(step, 4)
        by_id = {group.group_id: group for group in made}
        found = records.groups(step)
        assert [(r.group, r.weight, r.is_replayed) for r in found] == [
            (by_id[t.group_id], t.weight, t.is_replayed) for t in trained
        ]
        assert [r.group.prompt for r in found] == [by_id[t.group_id].prompt for t in trained]
        head = records.head(step)
        assert (head.step, head.policy_version, head.position, head.total_steps) == (step, step - 1, step - 0.5, LAST)
        assert head.settings["replay_groups"] == 2
    assert any(e.step is not None for step in wanted for e in records.head(step).groups), "replayed by reference"


def test_a_replayed_group_is_stored_once_unless_its_step_is_no_longer_kept(tmp_path: Path) -> None:
    run(tmp_path / "long", "all", range(1, LAST + 1), staleness=8)
    run(tmp_path / "short", 2, range(1, LAST + 1), staleness=8)
    of_all, of_two = (GroupRecords(tmp_path / name / "runs" / "r") for name in ("long", "short"))
    entries = [(step, entry) for step in of_all.steps for entry in of_all.head(step).groups if entry.is_replayed]
    assert all(entry.step == int(entry.group_id.split("-")[0]) for _, entry in entries)
    replayed = [(step, entry) for step in (LAST - 1, LAST) for entry in of_two.head(step).groups if entry.is_replayed]
    assert {entry.step is None for _, entry in replayed} == {True, False}
    assert all(entry.step is None or step - entry.step <= 2 for step, entry in replayed)
    assert all(len(of_two.groups(step)) == BATCH + 2 for step in (LAST - 1, LAST))


@pytest.mark.parametrize(
    ("kept", "every", "killed"), [("all", 5, 9), (1, 5, 13), (3, 5, 4), (3, 5, 19), (7, 5, 13), (3, 0, 9), (12, 7, 19)]
)
def test_a_killed_run_ends_with_the_files_of_an_undisturbed_one(
    tmp_path: Path, kept: Any, every: int, killed: int
) -> None:
    run(tmp_path / "undisturbed", kept, range(1, LAST + 1), every)
    resumed = killed // every * every if every else 0
    chosen = settings(tmp_path / "killed", kept)
    recorder = GroupRecorder(chosen, 0, has_room)
    for step in range(1, killed + 1):
        write(recorder, step)
        if every and step % every == 0:
            (chosen.checkpoint_dir / f"step-{step:06d}").mkdir()
    (chosen.run_dir / "groups" / f".step-{killed + 1:06d}.partial").write_bytes(b"cut off")
    run(tmp_path / "killed", kept, range(resumed + 1, LAST + 1), every)
    assert files(tmp_path / "killed") == files(tmp_path / "undisturbed")


def test_no_more_files_stay_than_the_plan_counts(tmp_path: Path) -> None:
    recorder = GroupRecorder(settings(tmp_path, 3, staleness=2), 0, has_room)
    for step in range(1, LAST + 1):
        write(recorder, step, 2)
        assert len(files(tmp_path)) <= 3 + 2
    assert sorted(files(tmp_path)) == [f"step-{step:06d}" for step in range(LAST - 4, LAST + 1)]


def test_off_writes_nothing_and_removes_the_records_of_abandoned_steps(tmp_path: Path) -> None:
    run(tmp_path, "all", range(1, 7))
    recorder = GroupRecorder(settings(tmp_path, "off"), 5, has_room)
    write(recorder, 6)
    assert sorted(files(tmp_path)) == [f"step-{step:06d}" for step in range(1, 6)]


def fail(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("is_refused", [True, False], ids=["room is short", "the write fails"])
def test_a_full_disk_costs_records_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    room = [True]
    recorder = GroupRecorder(settings(tmp_path, "all"), 0, lambda _size: room[0])
    assert write(recorder, 1) == 0
    with structlog.testing.capture_logs() as logged, monkeypatch.context() as full:
        if is_refused:
            room[0] = False
        else:
            full.setattr(group_records, "atomic_write", fail)
        assert [write(recorder, 2), write(recorder, 3)] == [BATCH + 2] * 2
    [said] = logged
    assert (said["step"], said["log_level"]) == (2, "error")
    assert "RECORD_GROUPS" in said["event"]
    assert ("No space left on device" in said["reason"]) != is_refused
    room[0] = True
    assert write(recorder, 4) == 0, "there is room again"
    records = GroupRecords(tmp_path / "runs" / "r")
    assert records.steps == [1, 4]
    by_id = {group.group_id: group for group in batch(4, 4)[1]}
    assert all(r.group == by_id[r.group.group_id] for r in records.groups(4)), "also those of the steps 2 and 3"


def damaged(file: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(file.read_bytes())
    change(content)
    file.write_bytes(bytes(content))


def test_damage_is_found_wherever_it_is_and_named(tmp_path: Path) -> None:
    run(tmp_path, "all", range(1, 3), staleness=1)
    records = GroupRecords(tmp_path / "runs" / "r")
    file = records.directory / "step-000001"
    whole = file.read_bytes()
    for place in [*range(64), *range(64, len(whole), 7), len(whole) - 1]:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(
            ConfigurationError, match=r"step-000001, the record of step 1, cannot be read: .*Put a copy"
        ):
            records.groups(1)
    for length in range(0, len(whole), 150):
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigurationError, match="step-000001"):
            records.groups(1)
    # Step 2 replays groups of step 1.
    with pytest.raises(ConfigurationError, match="step-000001"):
        records.groups(2)
    assert records.steps == [1, 2], "so that nobody thinks that the step was not recorded"
    file.unlink()
    assert records.steps == []
    with pytest.raises(ConfigurationError, match=r"step 1 has no record .*files of the steps 2 to 2; RECORD_GROUPS"):
        records.groups(1)


def test_a_resumed_run_keeps_what_a_damaged_file_lacks(tmp_path: Path) -> None:
    run(tmp_path, "all", range(1, 6))
    damaged(tmp_path / "runs/r/groups/step-000004", lambda content: content.__setitem__(20, content[20] ^ 1))
    with structlog.testing.capture_logs() as logged:
        run(tmp_path, "all", range(6, 9))
    assert [line["log_level"] for line in logged] == ["warning"]
    records = GroupRecords(tmp_path / "runs" / "r")
    assert all(len(records.groups(step)) == BATCH + 2 for step in range(6, 9) if step != 4)
    assert all(entry.step != 4 for step in range(6, 9) for entry in records.head(step).groups)
