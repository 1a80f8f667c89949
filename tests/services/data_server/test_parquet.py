"""Numbers of Parquet files become text without a change of their value, or are refused with their row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.core.errors import ConfigurationError
from services.data_server import sources
from services.data_server.settings import DataSettings


def truths(path: Path, answers: pa.Array) -> list[str]:
    pq.write_table(pa.table({"question": [f"q{i}" for i in range(len(answers))], "answer": answers}), path)
    source = sources.load(DataSettings(dataset=str(path)))
    rows = [row for split in (source.train, source.test) for row in split.take(list(range(len(split))))]
    assert all(row.answer == row.ground_truth for row in rows)
    return [row.ground_truth for row in sorted(rows, key=lambda row: row.number)]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (pa.array([1.0, None, 2.5, 1e15, -1e14, 1.5e-7, 100.0]), "1 2.5 1000000000000000 -100000000000000 1.5e-7 100"),
        (pa.array([0.1, 3.0, 16777215.0], pa.float32()), "0.1 3 16777215"),
        (pa.array([9007199254740993, 2**63 - 1]), "9007199254740993 9223372036854775807"),
        (pa.array([2**64 - 1, 1], pa.uint64()), "18446744073709551615 1"),
    ],
)
def test_numbers_are_written_in_full(tmp_path: Path, answers: Any, expected: str) -> None:
    assert truths(tmp_path / "rows.parquet", answers) == expected.split()


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (pa.array([1.0, None, 9007199254740992.0]), "holds double, and row 2 (from 0) has 9007199254740992.0"),
        (pa.array([1.0, float("nan")]), "holds double, and row 1 (from 0) has nan"),
        (pa.array([1.0, 2.0, float("-inf")]), "holds double, and row 2 (from 0) has -inf"),
        (pa.array([2.0**24, 1.0], pa.float32()), "holds float, and row 0 (from 0) has 16777216.0"),
    ],
)
def test_numbers_whose_type_has_lost_digits_are_refused_with_their_row(tmp_path: Path, answers: Any, told: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        truths(tmp_path / "rows.parquet", answers)
    assert told in str(error.value)
    assert "store the column as text or as whole numbers" in str(error.value)
