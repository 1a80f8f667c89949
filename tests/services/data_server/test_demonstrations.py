"""Rows that are learned as they are: from a file to prompts with tokens, and what is refused in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.chat.tokenizers import load_tokenizer, tokenizer_digest
from services.core.errors import ConfigurationError
from services.data_server.dataset import Dataset, load
from services.data_server.settings import DataSettings
from services.protocol.groups import GroupFileHead, group_file
from services.protocol.prompts import Demonstration, Split
from tests.rows import write_rows
from tests.sequences import make_group, trained_sequence
from tests.services.data_server.conftest import save_ending_tokenizer

END = "</s>"
QUESTION = {"role": "user", "content": "one?"}
ANSWER = {"role": "assistant", "content": "two"}
ROW = {"messages": [QUESTION, ANSWER]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def model(chat_model: str) -> str:
    (Path(chat_model) / "config.json").write_text(json.dumps({"vocab_size": 300, "max_position_embeddings": 200}))
    return chat_model


@pytest.fixture
def base(base_model: str) -> str:
    (Path(base_model) / "config.json").write_text(json.dumps({"vocab_size": 300, "max_position_embeddings": 200}))
    return base_model


def loaded(tmp_path: Path, model: str, rows: list[Any], *, parquet: bool = False, **settings: Any) -> Dataset:
    path = write_rows(tmp_path / ("rows.parquet" if parquet else "rows.jsonl"), rows)
    return load(DataSettings(**{"dataset": str(path), "method": "sft", "model_name": model, **settings}))


def learned(dataset: Dataset, model: str) -> list[tuple[str, str] | None]:
    """Return the whole text of each training row's only sequence, and the text that is trained on."""
    tokenizer, catalogue, texts = load_tokenizer(model), dataset.catalogues[Split.TRAIN], []
    for place in range(len(catalogue)):
        if (record := catalogue.record(place)) is None:
            texts.append(None)
            continue
        [one] = [Demonstration(**demonstration) for demonstration in record["demonstrations"]]
        trained = [token for token, mask in zip(one.completion_ids, one.loss_mask, strict=True) if mask]
        texts.append((tokenizer.decode(record["prompt_ids"] + one.completion_ids), tokenizer.decode(trained)))
    return texts


@pytest.mark.parametrize("parquet", [False, True])
def test_rows_are_learned_to_the_end_token_and_all_of_them_are_trained(
    tmp_path: Path, model: str, parquet: bool
) -> None:
    more = [QUESTION, ANSWER, {"role": "user", "content": "three?"}, {"role": "assistant", "content": "four"}]
    dataset = loaded(tmp_path, model, [ROW, {"messages": more}], parquet=parquet)
    assert learned(dataset, model) == [
        (f"<user>one?{END}<assistant>two{END}", f"two{END}"),
        (f"<user>one?{END}<assistant>two{END}<user>three?{END}<assistant>four{END}", f"two{END}four{END}"),
    ]
    record = dataset.catalogues[Split.TRAIN].record(1)
    assert record is not None
    assert (record["prompt"], record["messages"]) == ("one?", [QUESTION])
    assert len(dataset.catalogues[Split.TEST]) == 0


def test_prompts_are_those_of_rl_and_completions_alone_are_trained(tmp_path: Path, model: str) -> None:
    rows = [
        {"prompt": "one?", "completion": "two"},
        {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [{"role": "assistant", "content": "three"}]},
    ]
    assert learned(loaded(tmp_path, model, rows, system_prompt="Count."), model) == [
        (f"<system>Count.{END}<user>one?{END}<assistant>two{END}", f"two{END}"),
        (f"<user>one?{END}<assistant>two{END}<user>one?{END}<assistant>three{END}", f"three{END}"),
    ]


def test_a_base_model_learns_texts_and_refuses_conversations(tmp_path: Path, base: str) -> None:
    rows = [{"prompt": "one?", "completion": "two"}, {"messages": [QUESTION, ANSWER]}]
    dataset = loaded(tmp_path, base, rows, prompt_style="plain")
    assert learned(dataset, base) == [(f"<s>one?two{END}", f"two{END}"), None]
    [refusal] = dataset.catalogues[Split.TRAIN].refusals.values()
    assert refusal.sentence.startswith("row 1, column messages: ")
    with pytest.raises(ConfigurationError, match="PROMPT_STYLE=plain"):
        loaded(tmp_path, base, rows)


def test_a_conversation_is_on_one_side_with_all_of_its_answers(tmp_path: Path, model: str) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": answer}]}
        for answer in ("a", "b", "c")
        for n in range(10)
    ]
    dataset = loaded(tmp_path, model, rows, dataset_held_out=0.3)
    train, test = (
        {record["prompt"] for place in range(len(split)) if (record := split.record(place)) is not None}
        for split in (dataset.catalogues[Split.TRAIN], dataset.catalogues[Split.TEST])
    )
    assert (len(train), len(test), train & test) == (7, 3, set())
    assert len(dataset.catalogues[Split.TEST]) == 9


def test_a_tokenizer_that_ends_texts_ends_only_the_answer(tmp_path: Path, base: str) -> None:
    ending = save_ending_tokenizer(tmp_path / "ending", base)
    rows = [{"prompt": "one?", "completion": "two"}, {"prompt": "one?", "completion": f"two{END}"}]
    dataset = loaded(tmp_path, ending, rows, prompt_style="plain")
    assert learned(dataset, ending) == [(f"<s>one?two{END}", f"two{END}")] * 2


def test_a_row_that_cannot_be_learned_is_left_out_counted_and_named(tmp_path: Path, model: str) -> None:
    for row, column in (
        ({"messages": [QUESTION]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"prompt": "one?"}, "prompt and completion"),
        ({"messages": [QUESTION, {**ANSWER, "content": 200 * "x"}]}, "messages"),
        (ROW | {"tools": [TOOL]}, "messages"),
        (ROW | {"tools": "[{"}, "messages"),
    ):
        dataset = loaded(tmp_path, model, [ROW, row, ROW])
        assert [text is None for text in learned(dataset, model)] == [False, True, False], row
        [refusal] = dataset.catalogues[Split.TRAIN].refusals.values()
        assert refusal.sentence.startswith(f"row 1, column {column}: ")
        assert {reason: count for reason, count in dataset.left_out.items() if count} == {refusal.reason: 1}
        with pytest.raises(ConfigurationError):
            loaded(tmp_path, model, [row])


def test_rows_without_the_columns_are_an_error(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigurationError, match="`messages`"):
        loaded(tmp_path, model, [{"question": "one?", "answer": "two"}])
    with pytest.raises(ConfigurationError, match="METHOD"):
        load(DataSettings(dataset="arithmetic", method="sft", model_name=model))
    with pytest.raises(ConfigurationError, match="PROMPT_STYLE"):
        DataSettings.load(method="sft", prompt_style="few_shot")


def test_no_held_out_question_is_learned(tmp_path: Path, model: str) -> None:
    held_out = tmp_path / "test.jsonl"
    held_out.write_text(json.dumps({"question": "one?", "answer": "two"}) + "\n")
    system, parts = {"role": "system", "content": "Count."}, [{"type": "text", "text": " one?"}]
    same = [
        ROW,
        {"messages": [system, {"role": "user", "content": parts}, ANSWER, QUESTION, ANSWER]},
        {"messages": [{"role": "user", "content": "one?\n  Be\nbrief."}, ANSWER]},
        {"prompt": "one? ", "completion": "three"},
        {"prompt": [system, QUESTION], "completion": [ANSWER]},
        {"prompt": [QUESTION], "completion": "three"},
    ]
    others = [
        {"messages": [{"role": "user", "content": "three?"}, ANSWER]},
        {"prompt": [QUESTION, ANSWER, QUESTION], "completion": "three"},
        {"prompt": "o ne?", "completion": "three"},
    ]
    dataset = loaded(tmp_path, model, [*same, *others], dataset_test=held_out, instruction="Be brief.")
    assert len(learned(dataset, model)) == len(others)
    assert dataset.left_out == {"too long": 0, "also held out": len(same)}
    record = dataset.catalogues[Split.TEST].record(0)
    assert record is not None
    assert (record["ground_truth"], "demonstrations" in record) == ("two", False)


def test_recorded_groups_are_learned_token_for_token(tmp_path: Path, model: str, base: str) -> None:
    tokenizer = load_tokenizer(model)
    sequences = [trained_sequence([5, 6, 7], [0.0] * 3, loss_mask=[True, False, True]), trained_sequence([8], [0.0])]
    group = make_group(sequences=sequences, prompt="one?")
    path = tmp_path / "best.groups"

    def write(tokenizer_: str) -> None:
        head = GroupFileHead(run="r", tokenizer=tokenizer_, where="reward >= 1")
        path.write_bytes(b"".join(group_file(head, [group])))

    write(tokenizer_digest(tokenizer))
    settings = {"dataset": str(path), "method": "sft", "model_name": model}
    record = load(DataSettings(**settings)).catalogues[Split.TRAIN].record(0)
    assert record is not None
    assert record["prompt_ids"] == group.prompt_ids
    assert [d["completion_ids"] for d in record["demonstrations"]] == [
        s.completion_ids.tolist() for s in group.sequences
    ]
    assert [d["loss_mask"] for d in record["demonstrations"]] == [s.mask.tolist() for s in group.sequences]
    with pytest.raises(ConfigurationError, match="METHOD=sft"):
        load(DataSettings(**settings | {"method": "rl"}))
    write("another")
    with pytest.raises(ConfigurationError, match="tokenizer"):
        load(DataSettings(**settings))
    path.write_text("something else")
    with pytest.raises(ConfigurationError, match="grpo groups"):
        load(DataSettings(**settings))
