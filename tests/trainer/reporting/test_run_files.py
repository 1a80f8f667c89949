"""The files of a run directory."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.core.endpoints import Task
from services.engines.settings import RolloutSettings
from services.http import provenance
from services.protocol.groups import TokenSequence
from services.protocol.rewards import FinishReason, RewardResult
from services.reward_server.settings import RewardSettings
from services.run_page.directory import FIRST_FAILURE
from tests.sequences import make_group
from trainer.config import TrainerSettings
from trainer.reporting.run_files import RunFiles


def test_a_run_that_fails_before_its_first_step_has_a_summary(tmp_path: Path) -> None:
    files = RunFiles(TrainerSettings.load(shared_dir=tmp_path, run_id="r"), 0, str)
    files.write_summary({"status": "failed", "accuracy_before": None})
    files.close()
    directory = tmp_path / "runs" / "r"
    assert orjson.loads((directory / "summary.json").read_bytes())["status"] == "failed"


def test_samples_have_the_prompt_as_the_model_saw_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.reporting.run_files.LOGGED_GROUPS", 1)
    settings = TrainerSettings.load(shared_dir=tmp_path, run_id="r")
    files = RunFiles(
        settings, 0, lambda ids: "".join({1: "7", 7: "<user>", 8: "3+4=", 9: "<assistant>"}[i] for i in ids)
    )
    completions = [
        TokenSequence(
            completion=text,
            completion_ids=[1],
            logprobs=[-0.5],
            policy_versions=[0] * 1,
            finish_reason=FinishReason.STOP,
            result=RewardResult(reward=float(text == "7")),
        )
        for text in ("7", "8")
    ]
    groups = [
        make_group(group_id=name, prompt="3+4=", ground_truth="7", prompt_ids=[7, 8, 9], sequences=completions)
        for name in ("first", "second")
    ]
    dropped = make_group(group_id="x", prompt="3+4=", ground_truth="7", prompt_ids=[7, 8, 9], sequences=completions[:1])
    files.record_samples(1, groups)
    files.record_step(1, {"reward_mean": 0.5}, [*groups, dropped])
    files.close()
    record = orjson.loads((settings.run_dir / "metrics.jsonl").read_bytes())
    assert (record["reward_counts"], record["failures"]) == ([[0.0, 2], [1.0, 3]], [])
    samples = [orjson.loads(line) for line in (settings.run_dir / "samples.jsonl").read_bytes().splitlines()]
    assert [(s["group_id"], s["prompt"], s["rendered_prompt"], s["completion"], s["reward"]) for s in samples] == [
        ("first", "3+4=", "<user>3+4=<assistant>", text, reward) for text, reward in (("7", 1.0), ("8", 0.0))
    ]


def test_config_json_has_every_component_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of the rollout nodes leaves its record on the volume; it may come after the trainer's start."""
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "grpo")
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    settings = TrainerSettings.load(shared_dir=tmp_path, run_id="r", tracker="none")
    services = {Task.REWARD_SERVER: provenance.describe(RewardSettings(reward_fn="format", jobgroup_token="hush"))}
    config = tmp_path / "runs" / "r" / "config.json"
    files = RunFiles(settings, 0, str, services)
    assert orjson.loads(config.read_bytes())["components"].keys() == {"ppo-trainer", "reward-server"}
    provenance.write_record(
        RolloutSettings(shared_dir=tmp_path, run_id="r", rollout_max_restarts=7), Task.ROLLOUT_SERVER
    )
    files.write_summary({"status": "failed", "accuracy_before": None})
    files.close()
    components = orjson.loads(config.read_bytes())["components"]
    assert components["reward-server"]["settings"]["reward_fn"] == "format"
    assert "rollout_max_restarts" in components["rollout-server"]["changed"]
    assert {"torch", "transformers"} <= components["ppo-trainer"]["packages"].keys()
    assert b"hush" not in config.read_bytes()


def test_a_resumed_run_keeps_the_evaluations_that_count(tmp_path: Path) -> None:
    settings = TrainerSettings.load(shared_dir=tmp_path, run_id="r")
    path = tmp_path / "runs" / "r" / "evaluations.jsonl"
    for resumed_step, kept in ((0, []), (0, []), (4, [0, 4])):
        files = RunFiles(settings, resumed_step, str)
        lines = path.read_bytes().splitlines() if path.exists() else []
        assert [orjson.loads(line)["step"] for line in lines] == kept
        for step in (0, 4, 6):
            files.record_evaluation(step, [{"prompt": "1 + 1 =", "completion": "2"}])
        files.close()


def test_a_resumed_run_has_no_outcome_until_it_ends(tmp_path: Path) -> None:
    settings = TrainerSettings.load(shared_dir=tmp_path, run_id="r")
    for step in (0, 4):
        files = RunFiles(settings, step, str)
        for name in ("summary.json", FIRST_FAILURE):
            assert not (tmp_path / "runs" / "r" / name).exists()
        files.write_summary({"status": "succeeded", "accuracy_before": None})
        (tmp_path / "runs" / "r" / FIRST_FAILURE).write_text("exception: KeyError")
        files.close()


def test_a_file_that_a_full_disk_does_not_create_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    files = RunFiles(TrainerSettings.load(shared_dir=tmp_path, run_id="r"), 0, str)
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(OSError, match="No space left on device"):
        files.record_evaluation(1, [{"prompt": "1 + 1 =", "completion": "2"}])
    files.close()
