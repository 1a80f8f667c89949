"""Values of files reach a run as the file has them, or the row that cannot be used is refused and named."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.core.errors import ConfigurationError
from services.data_server import dataset_rows
from services.data_server.settings import DataSettings
from tests.rows import write_rows


def truths(path: Path, answers: pa.Array) -> list[str]:
    pq.write_table(pa.table({"question": [f"q{i}" for i in range(len(answers))], "answer": answers}), path)
    source = dataset_rows.load(DataSettings(dataset=str(path)))
    rows = [row for split in (source.train, source.test) for row in split.take(list(range(len(split))))]
    assert all(row.answer == row.ground_truth for row in rows)
    return [row.ground_truth for row in sorted(rows, key=lambda row: row.number)]


NUMBERS = [
    (pa.array([1.0, None, 2.5, 1e15, -1e14, 1.5e-7, 100.0]), "1 2.5 1000000000000000 -100000000000000 1.5e-7 100"),
    (pa.array([0.1, 3.0, 16777215.0], pa.float32()), "0.1 3 16777215"),
    (pa.array([9007199254740993, 2**63 - 1]), "9007199254740993 9223372036854775807"),
    (pa.array([2**64 - 1, 1], pa.uint64()), "18446744073709551615 1"),
    (pa.array([Decimal("1.50"), Decimal("-2000000.25"), None]), "1.50 -2000000.25"),
    (pa.array([Decimal("1.5"), Decimal(10) ** 30], pa.decimal256(40, 1)), f"1.5 1{'0' * 30}.0"),
    (pa.array(["1,000", "b"], pa.string_view()), "1,000 b"),
    (pa.array(["a", "b"], pa.large_string()), "a b"),
    (pa.array(["a", "b"], pa.large_string()).dictionary_encode(), "a b"),
    (pa.array([7, 8]).dictionary_encode(), "7 8"),
]


def test_numbers_are_written_in_full_and_those_whose_type_has_lost_digits_refused_with_their_row(
    tmp_path: Path,
) -> None:
    for answers, expected in NUMBERS:
        assert truths(tmp_path / "rows.parquet", answers) == expected.split()
    for answers, place in (
        (pa.array([1.0, None, 9007199254740992.0]), "row 2 (from 0) has 9007199254740992.0"),
        (pa.array([1.0, float("nan")]), "row 1 (from 0) has nan"),
        (pa.array([1.0, 2.0, float("-inf")]), "row 2 (from 0) has -inf"),
        (pa.array([2.0**24, 1.0], pa.float32()), "row 0 (from 0) has 16777216.0"),
    ):
        with pytest.raises(ConfigurationError) as error:
            truths(tmp_path / "rows.parquet", answers)
        assert place in str(error.value)


@pytest.mark.parametrize("column", ["question", "answer", "category", "tests"])
def test_a_column_of_views_is_one_of_text(tmp_path: Path, column: str) -> None:
    rows = {name: ["a", "b"] for name in ("question", "answer", "category", "tests")}
    view = pa.array(["a", "b"], pa.string_view())
    pq.write_table(pa.table(rows | {column: view}), tmp_path / "rows.parquet")
    source = dataset_rows.load(DataSettings(dataset=str(tmp_path / "rows.parquet")))
    [row] = source.train.take([0])
    assert row.question == row.answer == row.category
    assert json.loads(source.train.text(0) or "") == dict.fromkeys(rows, row.question)


@pytest.mark.parametrize("variable", ["DATASET", "DATASET_TEST"])
def test_a_file_without_rows_is_told_plainly(tmp_path: Path, variable: str) -> None:
    good = write_rows(tmp_path / "good.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(3)])
    empty = pa.table({"question": pa.array([], pa.string()), "answer": pa.array([], pa.string())})
    for name, table in (("none.parquet", empty), ("nothing.parquet", pa.table({})), ("blank.jsonl", None)):
        path = tmp_path / name
        path.write_text("\n \n") if table is None else pq.write_table(table, path)
        files = {"dataset": str(path)} if variable == "DATASET" else {"dataset": str(good), "dataset_test": path}
        with pytest.raises(ConfigurationError, match=f"{variable} '{path}' has no rows; "):
            dataset_rows.load(DataSettings(**files))


FLOATS = (
    "1 2.5 1.0 0.1 1e-5 1.5e-7 12345678.9 0.30000000000000004 -3.25 1234567890 1e3 0.0001 -0.125 1234567890123456.7"
)


def answered(*answers: object) -> str:
    """Return the lines of questions with these answers, each the text of a JSON value."""
    return "".join(f'{{"question": "a{i}", "answer": {answer}}}\n' for i, answer in enumerate(answers))


def loaded(path: Path, content: str | bytes) -> dataset_rows.DatasetRows:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return dataset_rows.load(DataSettings(dataset=str(path)))


def json_truths(path: Path, *answers: object) -> list[str]:
    """Return the ground truths of a file with these answers, in its order."""
    source = loaded(path, answered(*answers))
    rows = [row for split in (source.train, source.test) for row in split.take(list(range(len(split))))]
    return [row.ground_truth for row in sorted(rows, key=lambda row: row.number)]


def test_values_are_as_in_the_file(tmp_path: Path) -> None:
    for answers, expected in (
        (['"2024-01-02"', '"2024-01-03T10:00:00Z"'], ["2024-01-02", "2024-01-03T10:00:00Z"]),
        (["9007199254740999", "100000000000000000002"], ["9007199254740999", "100000000000000000002"]),
        (["-9007199254740993", "0.5", "12345678901234567890"], ["-9007199254740993", "0.5", "12345678901234567890"]),
        (["1", '"x"', "2.0"], ["1", "x", "2"]),
        (["1e15", "1e-5", "123456789012.0"], ["1000000000000000", "0.00001", "123456789012"]),
        (['"007"', '"1e3"', '"NaN"', r'"\ud83d\ude00 [{"'], ["007", "1e3", "NaN", "\U0001f600 [{"]),
    ):
        assert json_truths(tmp_path / "rows.jsonl", *answers) == expected


def test_the_digest_of_a_file_and_the_choice_of_its_rows_are_those_of_earlier_runs(tmp_path: Path) -> None:
    # The digest is of the release that read JSON Lines with Arrow.
    source = loaded(tmp_path / "rows.jsonl", answered(*FLOATS.split()))
    assert (source.train.content, source.test.numbers.tolist()) == ("d1637ea2f549efeb6911f47be77507e3", [3])


def test_a_file_that_changes_in_a_run_changes_no_prompt(tmp_path: Path) -> None:
    source = loaded(tmp_path / "rows.jsonl", answered(*range(10)))
    before = source.train.take([0, 1, 2])
    (tmp_path / "rows.jsonl").write_text("")
    assert source.train.take([0, 1, 2]) == before


NESTED = "[" * 3000 + "]" * 3000


LINES = [
    ('{"question": "caf\xe9", "answer": "1"}'.encode("latin-1"), "line 3, column 18: byte 0xe9"),
    ('{"question": "q", "answer": "1"}\n'.encode("utf-16"), "line 3, column 1: byte 0xff"),
    (f'{{"question": "q", "answer": "1", "more": {NESTED}}}', "line 3 is nested more than 100 deep"),
    ('{"question": "q", "answer": NaN}', "line 3, column 29: "),
    ('{"question": "NaN", "answer": "1", "more": [-Infinity]}', "line 3, column 46: "),
    ('{"question": "q", "answer": "1"', "line 3, column 32: "),
    ('{"question": "q", "answer": "1"} {"question": "r"}', "line 3, column 34: "),
    (f'{{"question": "q", "answer": {"7" * 5000}}}', "line 3, column 29: "),
    (r'{"question": "\ud83d", "answer": "1"}', "line 3, column 15: "),
    ('["q", "1"]', "line 3 is list"),
    ('{"question": "q", "answer": true}', "line 3: column 'answer' holds bool"),
    ('{"question": {"a": 1}, "answer": "1"}', "line 3: column 'question' holds dict"),
    ('{"question": "q", "answer": 1e20}', "line 3: column 'answer' has 1e+20"),
    ('{"question": "q", "answer": 9007199254740993.0}', "line 3: column 'answer' has 9007199254740992.0"),
    ('{"question": "q", "answer": 1e999}', "line 3, column 29: "),
    (b'{"question": "' + b"x" * 2**26 + b'", "answer": "1"}', "line 3 has more than 64 MiB"),
]


def test_a_line_that_is_no_row_is_refused_with_its_place(tmp_path: Path) -> None:
    for line, place in LINES:
        content = answered(1).encode() + b"\n" + (line.encode() if isinstance(line, str) else line)
        with pytest.raises(ConfigurationError) as error:
            loaded(tmp_path / "rows.jsonl", content + b"\n" + answered(2, 3).encode())
        assert f"DATASET '{tmp_path}/rows.jsonl'" in str(error.value)
        assert place in str(error.value)
        assert len(str(error.value)) < 400


def test_a_full_disk_for_the_copy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(ConfigurationError, match="TMPDIR"):
        loaded(tmp_path / "rows.jsonl", answered(1, 2, 3))
