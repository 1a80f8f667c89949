"""Files that are not read are refused with the command that converts them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from services.core.errors import ConfigurationError
from services.data_server import dataset_rows
from services.data_server.settings import DataSettings

ROWS = [{"question": f'say "{i}", né?\nnow', "answer": 9007199254740993 + i} for i in range(3)]
CSV = "question,answer\n" + "".join(
    '"{}",{}\n'.format(row["question"].replace('"', '""'), row["answer"]) for row in ROWS
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", "\ufeff" + CSV),
        ("my rows.csv", CSV),
        ("rows.tsv", CSV.replace('",9', '"\t9').replace("question,", "question\t")),
        ("rows.json", json.dumps(ROWS, indent=1, ensure_ascii=False)),
        ("it's.json", "".join(json.dumps(row) + "\n" for row in ROWS)),
    ],
)
def test_the_command_of_the_refusal_makes_a_file_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError) as error:
        dataset_rows.load(DataSettings(dataset=name))
    message = str(error.value)
    assert message.startswith(f"DATASET {name!r}: allowed are files that end in .jsonl or .parquet; ")
    command = shlex.split(message.partition("it: ")[2])
    subprocess.run([sys.executable if part == "python3" else part for part in command], check=True)
    source = dataset_rows.load(DataSettings(dataset=str(Path(name).with_suffix(".jsonl"))))
    rows = [row for split in (source.train, source.test) for row in split.take(list(range(len(split))))]
    found = {row.question: row.ground_truth for row in rows}
    assert found == {row["question"]: str(row["answer"]) for row in ROWS}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.csv", "DATASET 'missing.csv' is not a file, seen from {here}; give the path of one"),
        ("rows.txt", "DATASET 'rows.txt': allowed are files that end in .jsonl or .parquet"),
        ("folder.jsonl", "DATASET 'folder.jsonl' cannot be read (Is a directory); give a file that can be"),
    ],
)
def test_what_is_no_file_of_rows_is_not_taken_for_a_dataset_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.txt").write_text("a question")
    Path("folder.jsonl").mkdir()
    with pytest.raises(ConfigurationError) as error:
        dataset_rows.load(DataSettings(dataset=name))
    assert str(error.value).startswith(message.format(here=tmp_path))
