"""The rows of JSON Lines, each line kept as it is and parsed as JSON.

So no value changes on the way: a text that looks like a date stays text, 1 and "1" differ, an absent key is not null,
and a whole number keeps all of its digits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from services.core.errors import ConfigurationError
from services.data_server import tables
from services.data_server.settings import DataSettings
from services.http.json_body import json_depth

LARGEST_LINE = 64 * 2**20
DEEPEST = 100
"""Arrays and objects within each other; Python's parser has a limit that depends on its version."""
_MOST_PROBLEMS = 5
"""The number of wrong lines that an error names; the rest of the file is not read."""
_ROWS_A_BATCH = 4096
_BATCH_CHARACTERS = 2**24


def read_json_lines(path: Path, where: str, settings: DataSettings) -> tables.ReadTable:
    """Return a function that maps the question, answer and category of each row as text, and perhaps the line itself.

    The texts are in a temporary file, so that a change of ``path`` does not affect a run.

    Args:
        path: the file.
        where: the file and its variable, for messages.
        settings: give the columns.

    Raises:
        ConfigurationError: a line is not a row, a column is missing, or a value is neither text nor a number.
    """
    names: dict[str, None] = {}
    for line in json_rows(path, where):
        names.update(dict.fromkeys(line.row))
    if not names:
        raise ConfigurationError(f"{where} has no rows; write a JSON object a line, with a question and an answer")
    chosen = tables.choose_columns(list(names), where, settings)
    of_rows = tables.row_columns(list(names), chosen, settings)
    schema = pa.schema([(name, pa.string()) for name in [*chosen, *([tables.ROW] if of_rows else [])]])

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in _batches(json_rows(path, where)):
            columns = [_texts(batch, name, column, where) for name, column in chosen.items()]
            if of_rows:
                columns.append(
                    pa.array([tables.bounded(line.text, settings.largest_row) for line in batch], pa.string())
                )
            yield pa.record_batch(columns, schema)

    return tables.ReadTable(tables.on_disk(batches(), schema, where), **of_rows)


class Line(NamedTuple):
    """A line of a file: its number from 1 on, its text, and the object in it."""

    number: int
    text: str
    row: dict[str, Any]


def _batches(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Yield the lines in lists that fit in memory."""
    batch: list[Line] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line.text)
        if len(batch) == _ROWS_A_BATCH or size > _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def json_rows(path: Path, where: str) -> Iterator[Line]:
    """Yield each line that is not blank.

    Raises:
        ConfigurationError: a line is too long or nested too deep, is not UTF-8, or is not a JSON object; the message
            has its number, and its column where there is one.
    """
    problems: list[str] = []
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LARGEST_LINE + 1), b""), 1):
            try:
                if text := line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip():
                    yield Line(number, text, _object(text))
            except UnicodeDecodeError as error:
                column = len(line[: error.start].decode()) + 1
                problems.append(f"line {number}, column {column}: byte 0x{line[error.start]:02x} is not UTF-8")
            except orjson.JSONDecodeError as error:
                problems.append(f"line {number}, column {error.colno}: {error.msg.partition(': line ')[0]}")
            except ValueError as error:
                problems.append(f"line {number} {str(error).partition(';')[0]}")
            if len(line) > LARGEST_LINE or len(problems) == _MOST_PROBLEMS:
                break
    if problems:
        raise ConfigurationError(f"{where} cannot be read as .jsonl: {'; '.join(problems)}; correct the file")


def _object(text: str) -> dict[str, Any]:
    """Return the object of a line. orjson finds what is not JSON; Python's parser keeps the digits of large numbers.

    Raises:
        ValueError: the line is something else; the message continues a sentence behind the line's number.
    """
    if len(text) > LARGEST_LINE:
        raise ValueError(f"has more than {LARGEST_LINE // 2**20} MiB")
    if text.count("[") + text.count("{") > DEEPEST and json_depth(text.encode()) > DEEPEST:
        raise ValueError(f"is nested more than {DEEPEST} deep")
    orjson.loads(text)
    row = json.loads(text)
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, which is not an object")
    return row


def _texts(batch: list[Line], name: str, column: str, where: str) -> pa.Array:
    """Return a column of some rows as text; ``name`` says what it is used for."""
    texts: list[str | None] = []
    problems: list[str] = []
    for line, _, row in batch:
        value = row.get(column)
        try:
            texts.append(value if value is None or isinstance(value, str) else _json_text(value, name))
        except ValueError as error:
            problems.append(f"line {line}: column {column!r} {error}")
    if problems:
        raise ConfigurationError(f"{where}, {'; '.join(problems[:_MOST_PROBLEMS])}")
    return pa.array(texts, pa.string())


def _json_text(value: Any, name: str) -> str:
    if name == tables.CATEGORY:
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"holds {type(value).__name__}; set {tables.COLUMN_SETTINGS[name]} to a column of text or numbers"
        )
    if isinstance(value, float) and not abs(value) < tables.EXACT:
        raise ValueError(
            f"has {value!r}: a number with a fraction or an exponent does not keep every digit from 2^53 on; write it "
            "as a whole number, or as text"
        )
    if isinstance(value, int) or value.is_integer():
        return str(int(value))
    return str(pa.scalar(value).cast(pa.string()))
