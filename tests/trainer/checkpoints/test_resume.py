"""A run goes on only with the same model, tokenizer and data, wherever they lie, and not after another job has
succeeded with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.core.errors import ConfigurationError
from services.protocol.prompts import DataStats
from services.weights.policy_store import PolicyStore
from tests.trainer.rank_jobs import make_learner
from tests.trainer.tiny import FAMILIES, save_model
from trainer.checkpoints.checkpoint import MANIFEST, CheckpointStore, write_manifest
from trainer.checkpoints.run_checkpoints import resume
from trainer.checkpoints.state import Fingerprint, RunState, check_data, data_differences, has_succeeded
from trainer.config import TrainerSettings
from trainer.model.loading import weights_digest
from trainer.model.ranks import Ranks

DATA = {"training prompts": "40 (digest 1a)", "order": "shuffled, DATA_SEED 0, CURRICULUM off"}
FIRST = "grpo-1-20260101-000000"
OLD, NEW = (f"sky-managed-2026-0{month}-01-00-00-00-000000_grpo_ppo-trainer_1-4" for month in (1, 2))


def stats(source: str = "arithmetic", **others: str) -> DataStats:
    return DataStats(source=source, train_prompts=40, test_prompts=10, refused={}, fingerprint=DATA | others)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", FAMILIES["qwen2"])


def start(ranks: Ranks, directory: Path, model: Path, data: DataStats) -> tuple[RunState, CheckpointStore, Any]:
    """Do as a trainer before its first step: return the state to go on from, the checkpoints and the learner."""
    learner = make_learner(ranks, model, shared_dir=directory, run_id="r")
    checkpoints = CheckpointStore(learner.settings.checkpoint_dir, 2, ranks)
    return resume(learner, checkpoints, data), checkpoints, learner


@pytest.fixture
def begun(alone: Ranks, tmp_path: Path, model: Path) -> Path:
    """The directory of a run with a checkpoint of step 3."""
    state, checkpoints, learner = start(alone, tmp_path, model, stats())
    state.step = 3
    checkpoints.save(learner, state, wait=True)
    return learner.settings.run_dir


def other_weights(model: Path) -> None:
    save_model(model, FAMILIES["qwen2"], seed=1)


def other_vocabulary(model: Path) -> None:
    file = model / "tokenizer.json"
    file.write_text(file.read_text().replace('"7"', '"seven"'))


def other_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")


@pytest.mark.parametrize(
    ("change", "part"), [(other_weights, "weights"), (other_vocabulary, "tokenizer"), (other_template, "tokenizer")]
)
def test_another_model_of_the_same_shape_is_refused_by_what_differs(
    alone: Ranks, tmp_path: Path, model: Path, begun: Path, change: Any, part: str
) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    change(other)
    with pytest.raises(
        ConfigurationError, match=f"step-000003, .*the {part} of MODEL_NAME: .*digest.*RUN_ID"
    ) as refused:
        start(alone, tmp_path, other, stats())
    assert [name in str(refused.value) for name in ("the weights", "the tokenizer", "the data")] == [
        part == "weights",
        part == "tokenizer",
        False,
    ]


def test_other_data_are_refused_by_the_parts_that_differ(
    alone: Ranks, tmp_path: Path, model: Path, begun: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"'gsm8k' now; training prompts 40 .* then, 7473 .* now\.") as refused:
        start(alone, tmp_path, model, stats("gsm8k", **{"training prompts": "7473 (digest 2b)"}))
    assert "order" not in str(refused.value)


def test_a_collector_refuses_other_data_before_it_asks_for_any(begun: Path, tmp_path: Path) -> None:
    settings = TrainerSettings.load(shared_dir=tmp_path, run_id="r")
    check_data(settings, stats("renamed"))
    with pytest.raises(ConfigurationError, match=r"the data: .* order shuffled, DATA_SEED 0, .* then, other now"):
        check_data(settings, stats(order="other"))
    check_data(TrainerSettings.load(shared_dir=tmp_path, run_id="new"), stats(order="other"))


def test_the_same_model_and_data_in_another_place_are_gone_on_with(
    alone: Ranks, tmp_path: Path, model: Path, begun: Path
) -> None:
    moved = tmp_path / "elsewhere"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(moved, max_shard_size="10KB")
    AutoTokenizer.from_pretrained(model).save_pretrained(moved)
    assert not (moved / "model.safetensors").exists(), "in many files now"
    with structlog.testing.capture_logs() as logged:
        state, _, _ = start(alone, tmp_path, moved, stats("renamed"))
    assert state.step == 3
    assert state.fingerprint is not None
    assert state.fingerprint.model == str(model), "what it was begun with"
    assert [entry["event"] for entry in logged if entry["log_level"] == "warning"] == []


def test_a_checkpoint_of_another_form_is_refused(alone: Ranks, tmp_path: Path, model: Path, begun: Path) -> None:
    checkpoint = begun / "checkpoints" / "step-000003"
    saved = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(saved | {"cursor": saved.pop("cursors")}))
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint)
    with pytest.raises(ConfigurationError, match="step-000003: another version of this program wrote its state"):
        start(alone, tmp_path, model, stats())


def test_a_digest_of_weights_shows_each_parameter_and_no_number_format(model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    digest = weights_digest(loaded)
    assert weights_digest(loaded.to(torch.float32)) == digest
    digests = {digest}
    for parameter in loaded.parameters():
        with torch.no_grad():
            parameter.flatten()[0].add_(1)
        digests.add(weights_digest(loaded))
    assert len(digests) == 1 + len(list(loaded.parameters()))


# --- policy versions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "version"), [("sync", 0), ("async", 8)])
def test_no_version_is_used_twice_in_asynchronous_mode(
    alone: Ranks, tmp_path: Path, model: Path, mode: str, version: int
) -> None:
    """The trainer was killed while it wrote version 7, which workers had got by broadcast."""
    learner = make_learner(alone, model, shared_dir=tmp_path, run_id="r", mode=mode)
    store = PolicyStore(learner.settings.policy_dir)
    store.begin(6)
    store.commit(6)
    store.begin(7)
    checkpoints = CheckpointStore(learner.settings.checkpoint_dir, 2, alone)
    state = resume(learner, checkpoints, stats())
    assert state.policy_version == version
    left = [] if mode == "sync" else ["v000006"]
    assert [path.name for path in store.policy_dir.iterdir()] == left, "nothing of the version that was not finished"


# --- runs that have succeeded ----------------------------------------------------------------------------------------


def settings_of(directory: Path, monkeypatch: pytest.MonkeyPatch, task_id: str | None, **given: str) -> TrainerSettings:
    monkeypatch.delenv("RUN_ID", raising=False)
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "grpo")
    if task_id is None:
        monkeypatch.delenv("SKYPILOT_TASK_ID", raising=False)
    else:
        monkeypatch.setenv("SKYPILOT_TASK_ID", task_id)
    return TrainerSettings.load(shared_dir=directory, **given)


@pytest.fixture
def succeeded(tmp_path: Path) -> Path:
    """A volume on which the first job of an old controller has succeeded."""
    directory = tmp_path / "runs" / FIRST
    directory.mkdir(parents=True)
    summary = {"status": "succeeded", "steps": 12, "job": "1 of 2026-01-01-00-00-00-000000"}
    (directory / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def test_a_job_that_has_succeeded_has_nothing_left_to_do(succeeded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_succeeded(settings_of(succeeded, monkeypatch, OLD))
    collector = OLD.replace("ppo-trainer", "collector").replace("_1-4", "_1-5")
    assert has_succeeded(settings_of(succeeded, monkeypatch, collector)), "it is a task of the same job"


def test_a_job_of_the_same_number_of_a_new_controller_is_a_run_of_its_own(
    succeeded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(succeeded, monkeypatch, NEW)
    assert settings.run_id == "grpo-1-20260201-000000"
    assert not has_succeeded(settings)


def test_a_run_without_a_job_does_not_go_on_after_it_has_succeeded(
    succeeded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(succeeded, monkeypatch, None)
    (succeeded / "runs" / FIRST).rename(settings.run_dir)
    with pytest.raises(ConfigurationError) as refused:
        has_succeeded(settings)
    assert "has succeeded after 12 steps, as job 1 of 2026-01-01" in str(refused.value)
    assert f"RUN_ID={settings.run_id} to continue that run" in str(refused.value)


def test_a_run_that_is_asked_for_by_name_is_gone_on_with(succeeded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_succeeded(settings_of(succeeded, monkeypatch, NEW, run_id=FIRST))


@pytest.mark.parametrize("status", ["failed", None])
def test_a_run_that_has_not_ended_is_gone_on_with_after_a_restart_of_the_controller(
    succeeded: Path, monkeypatch: pytest.MonkeyPatch, status: str | None
) -> None:
    summary = succeeded / "runs" / FIRST / "summary.json"
    if status is None:
        summary.unlink()
    else:
        summary.write_text(json.dumps({"status": status}))
    settings = settings_of(succeeded, monkeypatch, NEW)
    assert settings.run_id == FIRST
    assert not has_succeeded(settings)


def test_whole_rows_are_compared_where_both_runs_had_them() -> None:
    before = Fingerprint(model="m", weights="w", tokenizer="t", dataset="d", data={"order": "o", "rows": "1"})
    assert not data_differences(before, "d", {"order": "o"})
    assert not data_differences(before.model_copy(update={"data": {"order": "o"}}), "d", {"order": "o", "rows": "1"})
    [difference] = data_differences(before, "d", {"order": "o", "rows": "2"})
    assert "rows 1 then, 2 now" in difference
