from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import ConfigurationError
from services.data_server import dataset_rows
from services.data_server.settings import DataSettings, GroundTruthFormat
from tests.rows import write_rows


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load_rows(rows: list[dict[str, Any]] | str, suffix: str = ".jsonl", **options: Any) -> dataset_rows.DatasetRows:
        dataset = rows if isinstance(rows, str) else str(write_rows(tmp_path / f"rows{suffix}", rows))
        return dataset_rows.load(DataSettings(dataset=dataset, **options))

    return load_rows


def truths(rows: dataset_rows.Rows) -> list[str]:
    return [row.ground_truth for row in rows.take(list(range(len(rows))))]


def test_gsm8k_ground_truths_stand_behind_the_last_hashes(load: Any, tmp_path: Path) -> None:
    answers = ["It is 2.\n#### 2", "#### 1\nno\n#### 70,000", "####-3 ", "a\n#### $18.50"]
    test = write_rows(tmp_path / "test.jsonl", [{"question": "q", "answer": "#### 5"}])
    source = load([{"question": f"q{i}", "answer": a} for i, a in enumerate(answers)], dataset_test=test)
    assert source.instruction == dataset_rows.INSTRUCTIONS[GroundTruthFormat.HASH]
    assert truths(source.train) == ["2", "70,000", "-3", "$18.50"]
    assert truths(source.test) == ["5"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_without_question_or_ground_truth_are_left_out_and_counted(load: Any, suffix: str) -> None:
    rows = [
        {"question": "a", "answer": "#### 1"},
        {"question": "b", "answer": "no mark"},
        {"question": " ", "answer": "#### 2"},
        {"question": None, "answer": "#### 3"},
        {"question": "c", "answer": None},
        {"question": "d", "answer": "####  "},
        {"question": "e", "answer": "#### 4"},
        {"question": "f", "answer": "#### 5"},
        {"question": "g", "answer": "#### 6"},
        {"question": "h", "answer": "#### 7"},
    ]
    source = load(rows, suffix)
    assert (source.rows, source.refused) == (len(rows), {"no question": 2, "no ground truth": 3})
    assert sorted(truths(source.train) + truths(source.test)) == ["1", "4", "5", "6", "7"]


def test_boxed_and_plain_ground_truths(load: Any) -> None:
    boxed = [{"problem": f"p{i}", "solution": rf"so \boxed{{\frac{{{i}}}{{2}}}}"} for i in range(3)]
    source = load(boxed)
    assert source.instruction == dataset_rows.INSTRUCTIONS[GroundTruthFormat.BOXED]
    assert sorted(truths(source.train) + truths(source.test)) == [rf"\frac{{{i}}}{{2}}" for i in range(3)]
    numbers = load([{"prompt": f"p{i}", "ground_truth": i} for i in range(3)])
    assert sorted(truths(numbers.train) + truths(numbers.test)) == ["0", "1", "2"]


@pytest.mark.parametrize("form", ["#### {}", r"\boxed{{{}}}", "{}"])
@pytest.mark.parametrize("truth", ["1,234", "-1,234,567.80", "1,2", "12,345", "(1,000)"])
def test_a_ground_truth_keeps_its_text(load: Any, form: str, truth: str) -> None:
    source = load([{"question": f"q{i}", "answer": form.format(truth)} for i in range(3)])
    assert truths(source.train) + truths(source.test) == [truth] * 3


def test_a_question_is_on_one_side_with_all_of_its_rows(load: Any) -> None:
    breaks = (" ", "  ", "\n", "\t ")
    rows = [{"question": f"What is{gap}{i} + 1?{gap}", "answer": f"{i}"} for gap in breaks for i in range(50)]
    sources = [load(rows, dataset_held_out=0.1, data_seed=seed) for seed in (1, 1, 2)]
    for source in sources:
        train, test = (Counter(truths(split)) for split in (source.train, source.test))
        assert set(train).isdisjoint(test)
        assert (len(train), len(test)) == (45, 5)
        assert {*train.values(), *test.values()} == {4}
    held_out = [truths(source.test) for source in sources]
    assert held_out[0] == held_out[1] != held_out[2]
    with pytest.raises(ConfigurationError, match="single question"):
        load(rows[:1] * 8)


def test_training_rows_whose_question_a_given_split_holds_out_are_left_out_and_counted(
    load: Any, tmp_path: Path
) -> None:
    rows = [{"question": f"q {i % 5}", "answer": f"{i}"} for i in range(10)] + [{"question": " ", "answer": "10"}]
    test = write_rows(tmp_path / "test.jsonl", [{"question": f" q\n{i}", "answer": "0"} for i in (1, 3, 9)])
    source = load(rows, dataset_test=test)
    assert truths(source.train) == ["0", "2", "4", "5", "7", "9"]
    assert (source.rows, source.refused) == (14, {"no question": 1, "also held out": 4})
    assert source.first_refused["also held out"] == 1
    with pytest.raises(ConfigurationError, match="10 with also held out"):
        load(rows, dataset_test=write_rows(tmp_path / "same.jsonl", rows))


def test_rows_whose_visible_columns_differ_ask_different_questions(load: Any, tmp_path: Path) -> None:
    rows = [{"question": "Mend it.", "answer": f"{i}", "repository": f"r{i % 4}", "more": i} for i in range(8)]
    test = write_rows(tmp_path / "test.jsonl", [rows[1] | {"more": 9}])
    seen = load(rows, dataset_test=test, agent_columns="repository")
    assert truths(seen.train) == ["0", "2", "3", "4", "6", "7"]
    halves = load(rows, dataset_held_out=0.5, agent_columns="repository")
    assert len(halves.test) == 4
    assert {int(truth) % 4 for truth in truths(halves.train)}.isdisjoint(int(t) % 4 for t in truths(halves.test))
    with pytest.raises(ConfigurationError, match="8 with also held out"):
        load(rows, dataset_test=test)


def test_a_dataset_that_cannot_be_had_is_named_in_one_line(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_text('{"question": "a", "answer": "1"}\n\n{"question": "a", "ans')
    Path("empty.jsonl").write_text("")
    Path("rows.txt").write_text("a question")
    Path("rows.csv").write_text("question,answer")
    Path("rows.json").write_text("[]")
    Path("folder.jsonl").mkdir()
    write_rows(Path("nothing.jsonl"), [{"question": " ", "answer": "1"}] * 2)
    write_rows(Path("one.jsonl"), [{"question": "a", "answer": "1"}])
    good = write_rows(Path("good.jsonl"), [{"question": "a", "answer": "1", "list": [1]}] * 3)
    write_rows(Path("strange.jsonl"), [{"x": "a"}])
    for dataset, options, named in (
        ("missing.jsonl", {}, "DATASET 'missing.jsonl' is not a file"),
        ("missing.csv", {}, "DATASET 'missing.csv' is not a file"),
        ("rows.txt", {}, "DATASET 'rows.txt': allowed are"),
        ("rows.csv", {}, "pandas.read_csv('rows.csv'"),
        ("rows.json", {}, "pandas.read_json('rows.json'"),
        ("folder.jsonl", {}, "DATASET 'folder.jsonl' cannot be read"),
        ("broken.jsonl", {}, "line 3, column 23"),
        ("empty.jsonl", {}, "'empty.jsonl' is empty"),
        ("nothing.jsonl", {}, "2 with no question"),
        ("one.jsonl", {}, "'one.jsonl' has a single question"),
        ("good.jsonl", {"prompt_column": "text"}, "PROMPT_COLUMN is 'text'"),
        ("good.jsonl", {"ground_truth_column": "list"}, "line 1: column 'list'"),
        ("good.jsonl", {"dataset_test": Path("no.jsonl")}, "DATASET_TEST 'no.jsonl'"),
        ("arithmetic", {"dataset_test": good}, "DATASET_TEST is 'good.jsonl'"),
        ("owner/name", {"dataset_test": good}, "DATASET_TEST_SPLIT"),
        ("strange.jsonl", {}, "PROMPT_COLUMN"),
    ):
        with pytest.raises(ConfigurationError) as error:
            load(dataset, **options)
        assert named in str(error.value)
        assert "\n" not in str(error.value)


def test_the_first_rows_of_a_hub_dataset_are_read_without_the_others(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def rows() -> Any:
        for number in range(1000):
            assert number < 10, "more rows are read"
            yield {"question": f"q{number}", "answer": float(number)}

    def hub(*_: Any, streaming: bool) -> Any:
        assert streaming
        return datasets.IterableDatasetDict({"train": datasets.IterableDataset.from_generator(rows)})

    monkeypatch.setattr(datasets, "load_dataset", hub)
    source = dataset_rows.load(DataSettings(dataset="owner/name"), first=3)
    assert sorted(truths(source.train) + truths(source.test)) == ["0", "1", "2"]
    with pytest.raises(ConfigurationError, match="PROMPT_COLUMN is 'text'"):
        dataset_rows.load(DataSettings(dataset="owner/name", prompt_column="text"), first=3)


def test_a_hub_dataset_that_cannot_be_reached_is_an_error_and_never_something_else(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConfigurationError, match=r"'openai/gsm8k' \(main\).*no network"):
        load("gsm8k")


def test_a_hub_dataset_is_taken_by_splits_and_configuration(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    requested: list[tuple[Any, ...]] = []

    def hub(name: str, config: str | None, **_: Any) -> Any:
        requested.append((name, config))
        rows, others = ({"question": questions, "answer": ["1", "2"]} for questions in (["a", "b"], ["c", "d"]))
        return datasets.DatasetDict(
            {"train": datasets.Dataset.from_dict(rows), "validation": datasets.Dataset.from_dict(others)}
        )

    monkeypatch.setattr(datasets, "load_dataset", hub)
    source = load("owner/name", dataset_config="hard", dataset_test_split="validation")
    assert requested == [("owner/name", "hard")]
    assert (len(source.train), len(source.test)) == (2, 2)
    with pytest.raises(ConfigurationError, match="DATASET_TEST_SPLIT"):
        load("owner/name", dataset_test_split="exam")


def test_columns_are_taken_by_name(load: Any) -> None:
    rows = [{"q": f"q{i}", "a": f"{i}", "category": "easy", "question": "wrong", "answer": "wrong"} for i in range(4)]
    source = load(rows, prompt_column="q", ground_truth_column="a")
    row = source.train.take([0])[0]
    assert (row.question, row.ground_truth, row.category) == (f"q{row.number}", str(row.number), "easy")
