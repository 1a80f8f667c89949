"""Records of samples.jsonl: conversations, and tokens with mask, version, log-probability and advantage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.protocol.groups import Group
from tests.sequences import changed, make_group
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.reporting import run_files
from trainer.reporting.run_files import SampleRecords

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
