"""The files of a run directory, and the records of samples.jsonl."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.core.endpoints import Task
from services.engines.settings import RolloutSettings
from services.http import provenance
from services.protocol.groups import Group, TokenSequence
from services.protocol.rewards import FinishReason, RewardResult
from services.reward_server.settings import RewardSettings
from services.run_page.directory import FIRST_FAILURE
from tests.sequences import changed, make_group
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.reporting import run_files
from trainer.reporting.run_files import RunFiles, SampleRecords


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


# --- samples.jsonl ---------------------------------------------------------------------------------------------------


SETTINGS = TrainerSettings.load()


def decode(ids: list[int]) -> str:
    """A token is a byte."""
    return bytes(ids).decode(errors="replace")


def experience(text: str, reward: float | None, **changes: Any) -> dict[str, Any]:
    ids = list(text.encode())
    fields = {
        "completion_ids": ids,
        "logprobs": [-0.25] * len(ids),
        "policy_versions": [3] * len(ids),
        "finish_reason": "stop",
        "result": {"reward": reward, "status": "error" if reward is None else "scored"},
    }
    return fields | changes


def group(*experiences: dict[str, Any], **changes: Any) -> Group:
    fields = {"group_id": "g", "prompt": "", "ground_truth": "", "prompt_ids": [80], "sequences": experiences}
    return make_group(**(fields | changes))


def spans(made: Group, **changes: Any) -> list[list[dict[str, Any]]]:
    trained = Objective(SETTINGS).with_advantages([Objective(SETTINGS.model_copy(update=changes)).training_group(made)])
    return [record["spans"] for record in SampleRecords(decode).of_step(1, [made], trained)]


def test_tokens_are_in_spans_by_mask_and_policy_version() -> None:
    episode = experience(
        "call result 42",
        1.0,
        loss_mask=[True] * 4 + [False] * 8 + [True] * 2,
        policy_versions=[3] * 2 + [4] * 4 + [5] * 8,
    )
    right, wrong = spans(group(episode, experience("no", 0.0)))
    assert [(span.get("version"), span.get("text", "".join(span.get("tokens", [])))) for span in right] == [
        (3, "ca"),
        (4, "ll"),
        (None, " result "),
        (5, "42"),
    ]
    assert [span.get("advantages") for span in right] == [0.707, 0.707, None, 0.707]
    assert right[-1]["logprobs"] == [-0.25, -0.25]
    [alone] = wrong
    assert alone["advantages"] == -0.707


def test_tokens_that_were_not_trained_on_have_no_advantage() -> None:
    failed, cut, _ = spans(
        group(experience("a", None), experience("b", 0.0, finish_reason="length"), experience("c", 1.0)),
        mask_truncated=True,
    )
    assert failed[0]["advantages"] is None
    assert cut[0]["advantages"] is None


def test_advantages_that_differ_by_token_are_kept_each() -> None:
    made = group(experience("ab", 1.0), experience("cd", 0.0))
    [trained] = Objective(SETTINGS).with_advantages([Objective(SETTINGS).training_group(made)])
    first, second = trained.sequences
    trained = replace(trained, sequences=[changed(first, advantages=[0.5, -0.123456]), second])
    [record, _] = SampleRecords(decode).of_step(1, [made], [replace(trained, is_replayed=True), trained])
    assert record["spans"][0]["advantages"] == [0.5, -0.1235]


def test_a_character_of_several_tokens_is_the_text_of_its_last_token() -> None:
    texts = SampleRecords(decode).token_texts(list("a数👩b".encode()))
    assert texts == ["a", "", "", "数", "", "", "", "👩", "b"]
    assert SampleRecords(decode).token_texts(list("a数".encode())[:-1]) == ["a", "", "\N{REPLACEMENT CHARACTER}"]
    assert "".join(SampleRecords(decode).token_texts([255] * 4 + [98])).endswith("b")


def test_words_keep_their_space_where_a_tokenizer_drops_that_of_a_texts_first_word() -> None:
    words = {1: "<s>", 2: " no", 3: " more"}
    ids = {"completion_ids": [2, 3], "logprobs": [-1, -1]}
    made = group(experience("..", 0.0, **ids), prompt_ids=[1, 2])
    [record] = SampleRecords(lambda ids: "".join(words[i] for i in ids).removeprefix(" ")).of_step(1, [made])
    assert record["spans"][0]["tokens"] == [" no", " more"]


def test_only_so_many_tokens_a_step_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "LOGGED_TOKENS", 5)
    made = group(experience("abcd", 1.0), experience("ef", 0.0), experience("g", 0.0))
    assert ["spans" in record for record in SampleRecords(decode).of_step(1, [made])] == [True, False, True]


def test_an_episode_has_its_figures_and_its_conversation() -> None:
    said = [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42", "sampled": True}]
    made = group(
        experience("42", 1.0, episode=2, messages=said),
        experience("1", 0.0),
        episode_figures={2: {"turns": 1, "branches": 0}},
    )
    first, plain = SampleRecords(decode).of_step(1, [made])
    assert (first["episode"], first["turns"], first["tool_calls"]) == (2, 1, 0)
    assert first["messages"] == said
    assert not plain.keys() & {"episode", "turns", "messages"}


def test_a_record_has_the_row_with_long_values_cut() -> None:
    row = b'{"tests": "' + b"x" * 1000 + b'", "level": 2, "when": "2024-01-02", "many": [1, null]}'
    [record] = SampleRecords(decode).of_step(1, [group(experience("a", 1.0), row=row)])
    shown = {"tests": "x" * 300 + "… 700 more characters", "level": "2", "when": "2024-01-02", "many": "[1, null]"}
    assert record["row"] == shown
    [record] = SampleRecords(decode).of_step(1, [group(experience("a", 1.0))])
    assert "row" not in record
