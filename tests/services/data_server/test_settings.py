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
