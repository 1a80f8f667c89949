"""A run goes on from its newest whole checkpoint as if it had never stopped, on as many ranks as there are then."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata, MetadataIndex

from services.core.errors import ConfigurationError
from tests.tolerance import both_types
from tests.trainer import rank_jobs
from tests.trainer.processes import run_on_ranks
from tests.trainer.rank_jobs import Arrays, make_learner, resume_and_train, run_state, train_and_save
from tests.trainer.tiny import FAMILIES, random_groups, save_model
from tests.waiting import IDLE_SECONDS
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CheckpointStore, _Unpickler, write_manifest
from trainer.model.ranks import Ranks, join_ranks
from trainer.model.rounding import UnbiasedRounding

GROUPS = random_groups(seed=1)
SAVED, LAST = 3, 5


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Arrays]:
    """Checkpoints of a run on one rank after each of three steps, and its weights after the fifth."""
    directory = tmp_path_factory.mktemp("trained")
    with join_ranks() as ranks:
        return directory, train_and_save(ranks, model, directory, GROUPS, SAVED, LAST)


@pytest.fixture
def checkpoints(trained: tuple[Path, Arrays], tmp_path: Path) -> Path:
    """A copy of the run's checkpoints."""
    return Path(shutil.copytree(trained[0], tmp_path / "checkpoints"))


def greatest_difference(weights: Arrays, expected: Arrays) -> float:
    assert weights.keys() == expected.keys()
    return max(float(np.abs(weights[name] - value).max()) for name, value in expected.items())


def test_a_state_in_host_memory_is_saved_and_resumed_to_the_bit(
    alone: Ranks, model: Path, trained: tuple[Path, Arrays], tmp_path: Path
) -> None:
    directory, undisturbed = trained
    offload = {"cpu_offload": True}
    _, weights = resume_and_train(alone, model, directory, GROUPS, LAST, offload)
    assert greatest_difference(weights, undisturbed) == 0, "from the checkpoint of a run without it"
    train_and_save(alone, model, tmp_path, GROUPS, SAVED, SAVED, offload)
    step, weights = resume_and_train(alone, model, tmp_path, GROUPS, LAST)
    assert step == SAVED
    assert greatest_difference(weights, undisturbed) == 0, "by a run without it"


@both_types
def test_rounded_weights_and_their_masters_are_resumed_to_the_bit(
    alone: Ranks, model: Path, tmp_path: Path, compute_type: str
) -> None:
    rounded = {"compute_type": compute_type, "publish_type": "bfloat16", "learning_rate": 1e-3}
    undisturbed = train_and_save(alone, model, tmp_path, GROUPS, SAVED, LAST, rounded)
    for offload in (False, True):
        _, weights = resume_and_train(alone, model, tmp_path, GROUPS, LAST, rounded | {"cpu_offload": offload})
        assert greatest_difference(weights, undisturbed) == 0
    _, weights = resume_and_train(alone, model, tmp_path, GROUPS, SAVED, rounded)
    _, masters = resume_and_train(alone, model, tmp_path, GROUPS, SAVED)
    assert greatest_difference(masters, weights) > 0, "a checkpoint has the masters"
    for name, master in masters.items():
        assert torch.equal(
            UnbiasedRounding()(name, torch.from_numpy(master)), torch.from_numpy(weights[name]).bfloat16()
        )


def test_the_number_of_ranks_may_change(model: Path, trained: tuple[Path, Arrays], tmp_path: Path) -> None:
    directory, undisturbed = trained
    more = run_on_ranks(2, resume_and_train, model, directory, GROUPS, LAST)
    for step, weights in more:
        assert step == SAVED
        assert greatest_difference(weights, undisturbed) < 1e-4
    run_on_ranks(2, train_and_save, model, tmp_path, GROUPS, SAVED, SAVED)
    with join_ranks() as ranks:
        _, weights = resume_and_train(ranks, model, tmp_path, GROUPS, LAST)
    assert greatest_difference(weights, undisturbed) < 1e-4


# --- what is damaged or does not belong here -------------------------------------------------------------------------


def cut_short(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


def change_one_byte(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lose_a_file(checkpoint: Path) -> None:
    next(checkpoint.glob("*.distcp")).unlink()


def empty_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("")


def make_up_a_field(checkpoint: Path) -> None:
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(state | {"unheard_of": 1}))


def lead_nowhere(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.symlink_to("nowhere")


@pytest.mark.parametrize(
    "damage",
    [change_one_byte, lose_a_file, empty_the_manifest, make_up_a_field, lead_nowhere],
    ids=lambda d: d.__name__,
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(
    alone: Ranks, model: Path, checkpoints: Path, damage: object
) -> None:
    assert callable(damage)
    damage(checkpoints / f"step-{SAVED:06d}")
    with structlog.testing.capture_logs() as logged:
        step, _ = resume_and_train(alone, model, checkpoints, GROUPS, SAVED)
    assert step == SAVED - 1
    [warning] = [entry for entry in logged if entry["event"] == "checkpoint not used"]
    assert f"step-{SAVED:06d}" in warning["path"]
    assert warning["reason"]


class RunsACommand:
    """A value that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.command = f"touch {file}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def in_the_metadata(checkpoint: Path, value: RunsACommand) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(value))


def in_the_metadatas_fields(checkpoint: Path, value: RunsACommand) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = value
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def in_place_of_a_tensor(checkpoint: Path, value: RunsACommand) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    name = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    torch.save(value, checkpoint / "value")
    size = (checkpoint / "value").stat().st_size
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo("value", 0, size)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "put", [in_the_metadata, in_the_metadatas_fields, in_place_of_a_tensor], ids=lambda put: put.__name__
)
def test_nothing_that_a_checkpoint_contains_is_run(
    alone: Ranks, model: Path, checkpoints: Path, tmp_path: Path, put: Callable[[Path, RunsACommand], None]
) -> None:
    def spoil(checkpoint: Path) -> None:
        put(checkpoint, RunsACommand(tmp_path / "was-run"))
        (checkpoint / "manifest.json").unlink()
        write_manifest(checkpoint)

    spoil(checkpoints / f"step-{SAVED:06d}")
    with structlog.testing.capture_logs() as logged:
        step, _ = resume_and_train(alone, model, checkpoints, GROUPS, SAVED)
    assert step == SAVED - 1
    [reason] = [entry["reason"] for entry in logged if entry["event"] == "checkpoint not used"]
    assert ".metadata is not the metadata of a checkpoint: " in reason
    assert ("posix.system, which no checkpoint has" in reason) != (put is in_place_of_a_tensor)
    for number in range(1, SAVED):
        if (other := checkpoints / f"step-{number:06d}").exists():
            spoil(other)
    with pytest.raises(ConfigurationError, match=r"no checkpoint in .* can be used; .* is not the metadata.*RUN_ID"):
        resume_and_train(alone, model, checkpoints, GROUPS, SAVED)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("target", ["nowhere", "elsewhere"])
def test_a_checkpoint_takes_the_place_of_a_link_and_leaves_alone_where_it_leads(
    alone: Ranks, model: Path, tmp_path: Path, target: str
) -> None:
    directory, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    learner = make_learner(alone, model)
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    store = CheckpointStore(directory, 1, alone)
    for link in (directory / "step-000001", directory / "step-000002", directory / ".step-000002.replaced"):
        link.symlink_to(tmp_path / target)
    for step in (2, 3):
        store.save(learner, run_state(learner, step), wait=True)
    assert [(path.name, path.is_symlink()) for path in directory.iterdir()] == [("step-000003", False)]
    assert (elsewhere / "mine").exists()


def test_a_checkpoint_of_another_model_is_refused_with_both_ways_out(
    alone: Ranks, checkpoints: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path / "other", FAMILIES["llama"])
    with pytest.raises(ConfigurationError, match=r"of another model or critic \(qwen2, \d+ parameters\).*RUN_ID"):
        resume_and_train(alone, other, checkpoints, GROUPS, LAST)


def test_what_was_never_finished_is_no_checkpoint_and_goes(alone: Ranks, model: Path, checkpoints: Path) -> None:
    for name in (".step-000009.partial", ".step-000009.old"):
        shutil.copytree(checkpoints / f"step-{SAVED:06d}", checkpoints / name)
    assert resume_and_train(alone, model, checkpoints, GROUPS, SAVED)[0] == SAVED
    assert not list(checkpoints.glob(".step-*"))


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank_ends_all_of_them_with_the_reason(model: Path, tmp_path: Path) -> None:
    for said, left in run_on_ranks(2, rank_jobs.save_on_a_full_disk, model, tmp_path):
        assert said.startswith("the disk is full: ")
        assert left == ["step-000001"]


# --- which are kept --------------------------------------------------------------------------------------------------


def test_the_last_ones_and_the_best_are_kept(alone: Ranks, model: Path, tmp_path: Path) -> None:
    learner = make_learner(alone, model)
    store = CheckpointStore(tmp_path, 2, alone)
    for step in range(1, 6):
        store.save(learner, run_state(learner, step, best_step=min(step, 2)), wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000004", "step-000005"]


def test_a_damaged_one_of_a_later_step_takes_no_place_of_those_that_are_kept(
    alone: Ranks, model: Path, tmp_path: Path
) -> None:
    learner = make_learner(alone, model)
    store = CheckpointStore(tmp_path, 1, alone)
    for step in (1, 9):
        store.save(learner, run_state(learner, step, best_step=1), wait=True)
    cut_short(tmp_path / "step-000009")
    for step in (2, 3):
        store.save(learner, run_state(learner, step), wait=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:06d}", "step-000009"]


def test_a_checkpoint_is_written_beside_the_training(alone: Ranks, model: Path, tmp_path: Path) -> None:
    learner = make_learner(alone, model)
    store = CheckpointStore(tmp_path, 1, alone)
    before = rank_jobs.weights_of(learner.policy)
    store.save(learner, run_state(learner, 1))
    learner.update(GROUPS, 0)  # changes the weights while those of before are being written
    state = store.finish()
    assert state is not None
    assert state.step == 1
    _, weights = resume_and_train(alone, model, tmp_path, GROUPS, 1)
    assert greatest_difference(weights, before) == 0


def test_no_checksum_is_computed_while_training_waits(
    alone: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(alone, model)
    store = CheckpointStore(tmp_path, 1, alone)
    reached, may_go_on, threads = threading.Event(), threading.Event(), set()
    checksum = checkpoint._checksum

    def slow_checksum(file: Path) -> str:
        threads.add(threading.current_thread())
        reached.set()
        assert may_go_on.wait(IDLE_SECONDS)
        return checksum(file)

    monkeypatch.setattr(checkpoint, "_checksum", slow_checksum)
    store.save(learner, run_state(learner, 1))
    assert reached.wait(IDLE_SECONDS)
    assert store.poll() is None, "the checkpoint is not in place before its checksums are"
    learner.update(GROUPS, 0)
    may_go_on.set()
    assert store.finish() is not None
    assert threading.current_thread() not in threads


@pytest.mark.parametrize(
    ("kind", "name", "is_member"),
    [
        (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT", True),
        (_MEM_FORMAT_ENCODING, "mro", False),
        (Metadata, "__init__", False),
    ],
)
def test_metadata_name_members_of_enumerations_as_any_python_writes_them(
    kind: type, name: str, is_member: bool
) -> None:
    """Python before 3.11.4 writes a member as a call of ``getattr``."""

    class Named:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (kind, name)

    read = _Unpickler(io.BytesIO(pickle.dumps(Named()))).load
    if is_member:
        assert read() is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    else:
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            read()
