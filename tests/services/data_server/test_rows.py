"""Whole rows: each column as the file has it, which rows are left out, and what rewards need of them."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.core.errors import ConfigurationError
from services.data_server import dataset_rows as sources
from services.data_server.batches import Batches
from services.data_server.dataset import load
from services.data_server.settings import DataSettings
from services.protocol.prompts import Cursor, Prompt, Split
from tests.rows import write_rows

REWARDS = """
def check(response, tests, difficulty=1):
    return 1.0

def whole(response, row):
    return 1.0

def to_truth(response, ground_truth):
    return 1.0

def like_trl(completions, tests, **kwargs):
    return [1.0]

def with_others(completions, **others):
    return [float(text == others["ground_truth"][0]) for text in completions]

def plain(response):
    return 1.0
"""


@pytest.fixture(autouse=True)
def _rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graders").mkdir()
    # Nobody imports the package, which may need the reward-server's libraries.
    (tmp_path / "graders/__init__.py").write_text("raise ImportError('there is no such library here')")
    (tmp_path / "graders/mine.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)


def prompts(path: Path, **options: Any) -> list[Prompt]:
    """Return all training prompts of a file, by their number."""
    batches = Batches.load(DataSettings(dataset=str(path), dataset_held_out=0.01, **options))
    records, _ = batches.batch(Split.TRAIN, Cursor(), len(batches.orders[Split.TRAIN]))
    found = [Prompt.model_validate_json(json.dumps(record)) for record in records]
    return sorted(found, key=lambda prompt: int(prompt.id.rpartition("/")[2]))


LINES = [
    '{"question": "a", "answer": "1", "when": "2024-01-02", "id": 9007199254740993, "n": 1}',
    '{"question": "b", "answer": "2", "when": "never", "n": "1", "more": null}',
    '{"question":"c","answer":3,"big":123456789012345678901234567890, "f": 0.10, "empty": []}',
    '{"question": "d", "answer": "4", "mixed": [1, "x", {"a": null}]}',
]


def test_a_line_of_json_reaches_the_prompt_to_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(LINES) + '\n{"question": "held out", "answer": "5"}\n')
    by_question = {json.loads(prompt.row)["question"]: prompt.row for prompt in prompts(path)}
    assert by_question.items() <= {json.loads(line)["question"]: line.encode() for line in LINES}.items() | {
        ("held out", b'{"question": "held out", "answer": "5"}')
    }
    assert len(by_question) == 4


def test_columns_of_a_schema_have_a_defined_form_in_json_and_binary_ones_are_left_out(tmp_path: Path) -> None:
    columns = {
        "question": ["a", "b"],
        "answer": ["1", "2"],
        "time": pa.array([datetime.datetime(2024, 1, 2, 3, 4, 5, 678)] * 2),
        "day": pa.array([datetime.date(2024, 1, 2), None]),
        "price": pa.array([decimal.Decimal("1.10")] * 2),
        "single": pa.array([0.1, 2.0], pa.float32()),
        "half": pa.array([0.5, 2.0], pa.float16()),
        "big": pa.array([2**64 - 1, 1], pa.uint64()),
        "nested": [{"a": [1, None], "b": "x"}, {"a": [], "b": None}],
        "kind": pa.array(["x", "y"]).dictionary_encode(),
        "photo": [b"\x00\xff", b""],
        "photos": [{"bytes": b"\x00"}, None],
        "took": pa.array([datetime.timedelta(seconds=1)] * 2),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    data = load(DataSettings(dataset="rows.parquet"))
    [row] = [data.catalogues[Split.TRAIN].row(0)["row"]]
    first = {
        "question": "a",
        "answer": "1",
        "time": "2024-01-02T03:04:05.000678",
        "day": "2024-01-02",
        "price": "1.10",
        "single": 0.10000000149011612,
        "half": 0.5,
        "big": 2**64 - 1,
        "nested": {"a": [1, None], "b": "x"},
        "kind": "x",
    }
    second = first | {"question": "b", "answer": "2", "day": None, "single": 2.0, "half": 2.0, "big": 1}
    second |= {"nested": {"a": [], "b": None}, "kind": "y"}
    assert json.loads(row) in (first, second)
    assert set(data.rows.columns) == set(first)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_that_are_too_large_are_left_out_with_the_number_of_the_first(tmp_path: Path, suffix: str) -> None:
    rows = [{"question": f"q{i}", "answer": str(i), "tests": "x" * (2**18 if i in (3, 5) else 10)} for i in range(9)]
    source = sources.load(DataSettings(dataset=str(write_rows(tmp_path / f"rows{suffix}", rows))))
    assert (source.refused, source.first_refused) == ({"more than 256 KiB": 2}, {"more than 256 KiB": 3})


def test_rows_of_a_schema_that_have_nan_are_left_out_with_the_number_of_the_first(tmp_path: Path) -> None:
    numbers = [1.0, None, float("nan"), 2.0, float("inf")]
    rows = [{"question": f"q{i}", "answer": str(i), "nested": [{"n": n}]} for i, n in enumerate(numbers)]
    source = sources.load(DataSettings(dataset=str(write_rows(tmp_path / "rows.parquet", rows))))
    assert (source.refused, source.first_refused) == ({"NaN or infinity": 2}, {"NaN or infinity": 2})


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("column", "some", "none"), [("images", ["a.png"], []), ("image", b"\x89PNG", None)])
def test_rows_with_images_are_left_out_with_the_number_of_the_first(
    tmp_path: Path, suffix: str, column: str, some: Any, none: Any
) -> None:
    if suffix == ".jsonl" and isinstance(some, bytes):
        some = {"path": "a.png"}
    rows = [{"question": f"q{i}", "answer": "1", column: some if i in (2, 4) else none} for i in range(6)]
    source = sources.load(DataSettings(dataset=str(write_rows(tmp_path / f"rows{suffix}", rows))))
    [(reason, first)] = source.first_refused.items()
    assert (source.refused[reason], first, reason.split(",")[0]) == (2, 2, "images")


PLAIN = [{"question": f"q{i}", "answer": str(i), "category": "a"} for i in range(6)]


TRAVEL = [
    (PLAIN, {}, False),
    (PLAIN, {"reward_fn": "graders.mine:plain"}, False),
    (PLAIN, {"reward_fn": "graders.mine:whole"}, True),
    (PLAIN, {"reward_fn": "graders.mine:with_others"}, True),
    (PLAIN, {"reward_fn": "code"}, True),
    (PLAIN, {"agent_columns": "category"}, True),
    ([row | {"level": 1} for row in PLAIN], {}, True),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_travel_where_they_have_further_columns_or_somebody_reads_them(tmp_path: Path, suffix: str) -> None:
    for rows, options, travel in TRAVEL:
        found = prompts(write_rows(tmp_path / f"rows{suffix}", rows), **options)
        assert [json.loads(prompt.row or "null") in rows for prompt in found] == [travel] * len(found), options


TESTED = [{"question": f"q{i}", "tests": [str(i)]} | ({"answer": str(i)} if i % 2 else {}) for i in range(8)]


def test_a_row_without_an_answer_is_used_where_no_reward_reads_one(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "rows.jsonl", TESTED))
    for reward_fn, used in {
        "graders.mine:check": 8,
        "code": 8,
        "graders.mine:like_trl,format": 8,
        "graders.mine:whole=1,judge=0.5": 8,
        "graders.mine:check,math": 4,
        "graders.mine:to_truth": 4,
        "graders.mine:with_others": 4,
        "graders.elsewhere:unknown": 4,
    }.items():
        source = sources.load(DataSettings(dataset=path, reward_fn=reward_fn))
        assert len(source.train) + len(source.test) == used, reward_fn
        assert source.first_refused == ({} if used == 8 else {"no ground truth": 0})


def test_a_file_without_answers_needs_a_reward_that_reads_none(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "rows.jsonl", [{"question": f"q{i}", "tests": []} for i in range(4)]))
    source = sources.load(DataSettings(dataset=path, reward_fn="graders.mine:check"))
    assert source.train.take([0])[0].ground_truth == ""
    with pytest.raises(ConfigurationError, match="GROUND_TRUTH_COLUMN"):
        sources.load(DataSettings(dataset=path, reward_fn="math"))
    assert sources.load(DataSettings(dataset=path, reward_fn="math", reward_weight=0)).rows == 4, "a teacher alone"


def test_a_column_that_no_row_has_is_refused() -> None:
    write_rows(Path("rows.jsonl"), [{"question": "q", "answer": "1", "test": 1}] * 3)
    write_rows(Path("good.jsonl"), TESTED)
    check, whole = "graders.mine:check", "graders.mine:whole"
    for dataset, options, named in (
        ("rows.jsonl", {"reward_fn": f"math,{check}"}, f"REWARD_FN '{check}' needs tests, which DATASET "),
        ("arithmetic", {"reward_fn": whole}, f"REWARD_FN '{whole}' needs row, which DATASET "),
        ("rows.jsonl", {"agent_columns": "test, hint"}, "AGENT_COLUMNS names hint"),
        ("good.jsonl", {"reward_fn": check, "dataset_test": Path("rows.jsonl")}, "tests, which DATASET_TEST "),
    ):
        with pytest.raises(ConfigurationError, match=named):
            sources.load(DataSettings(dataset=dataset, **options))


def test_columns_with_reserved_names_are_reached_through_the_row_alone(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "ground_truth": str(i), "messages": [], "row": 1, "level": 2} for i in range(4)]
    data = load(DataSettings(dataset=str(write_rows(tmp_path / "rows.jsonl", rows))))
    # The columns of question and answer have names of their own for rewards.
    assert data.rows.shadowed == ["messages", "row"]


def test_the_fingerprint_shows_a_changed_column_and_nothing_else_changes(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": str(i), "tests": [i]} for i in range(8)]

    def fingerprint(rows: list[dict[str, Any]]) -> dict[str, str]:
        return load(DataSettings(dataset=str(write_rows(tmp_path / "rows.jsonl", rows)))).fingerprint

    before, after = fingerprint(rows), fingerprint([*rows[:-1], rows[-1] | {"tests": ["7"]}])
    assert {part for part in before if before[part] != after[part]} == {"rows"}
    assert "rows" not in fingerprint(PLAIN)


def test_a_column_called_like_our_own_changes_no_question(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": str(i), "row": "x"} for i in range(4)]
    source = sources.load(DataSettings(dataset=str(write_rows(tmp_path / "rows.jsonl", rows))))
    row = source.train.take([0])[0]
    assert json.loads(source.train.text(0) or "") == {"question": row.question, "answer": row.answer, "row": "x"}
