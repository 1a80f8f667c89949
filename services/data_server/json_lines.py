"""The rows of JSON Lines, each line kept as it is and parsed as JSON.

So no value changes on the way: a text that looks like a date stays text, 1 and "1" differ, an absent key is not null,
and a whole number keeps all of its digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from services.core.errors import ConfigurationError
from services.data_server.settings import DataSettings
from services.data_server.tables import (
    CATEGORY,
    COLUMN_SETTINGS,
    EXACT,
    ROW,
    ReadTable,
    bounded,
    choose_columns,
    on_disk,
    row_columns,
)

LARGEST_LINE = 64 * 2**20
DEEPEST = 100
"""Arrays and objects within each other; Python's parser has a limit that depends on its version."""
_MOST_PROBLEMS = 5
"""The number of wrong lines that an error names; the rest of the file is not read."""
_ROWS_A_BATCH = 4096
_BATCH_CHARACTERS = 2**24
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]|-?Infinity|NaN')


def read_json_lines(path: Path, where: str, settings: DataSettings) -> ReadTable:
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
    chosen = choose_columns(list(names), where, settings)
    of_rows = row_columns(list(names), chosen, settings)
    schema = pa.schema([(name, pa.string()) for name in [*chosen, *([ROW] if of_rows else [])]])

    def batches() -> Iterator[pa.RecordBatch]:
        numbered = json_rows(path, where)
        while batch := _next_batch(numbered):
            columns = [_texts(batch, name, column, where) for name, column in chosen.items()]
            if of_rows:
                columns.append(pa.array([bounded(line.text, settings.largest_row) for line in batch], pa.string()))
            yield pa.record_batch(columns, schema)

    return ReadTable(on_disk(batches(), schema, where), **of_rows)


class Line(NamedTuple):
    """A line of a file: its number from 1 on, its text, and the object in it."""

    number: int
    text: str
    row: dict[str, Any]


def _next_batch(lines: Iterator[Line]) -> list[Line]:
    """Return the next lines, few enough that they fit in memory."""
    batch: list[Line] = []
    size = 0
    while len(batch) < _ROWS_A_BATCH and size < _BATCH_CHARACTERS and (line := next(lines, None)) is not None:
        batch.append(line)
        size += len(line.text)
    return batch


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
                found = _object(line, "utf-8-sig" if number == 1 else "utf-8")
            except _LineError as error:
                problems.append(f"line {number}{error}")
                if len(line) > LARGEST_LINE or len(problems) == _MOST_PROBLEMS:
                    break
                continue
            if found is not None:
                yield Line(number, *found)
    if problems:
        raise ConfigurationError(f"{where} cannot be read as .jsonl: {'; '.join(problems)}; correct the file")


class _LineError(Exception):
    """An error of a line; the message continues a sentence behind the line's number."""


def _object(line: bytes, encoding: str) -> tuple[str, dict[str, Any]] | None:
    """Return the text of a line and its object; None for a blank one."""
    if len(line) > LARGEST_LINE:
        raise _LineError(f" has more than {LARGEST_LINE // 2**20} MiB")
    try:
        text = line.decode(encoding).rstrip()
        if not text:
            return None
        if text.count("[") + text.count("{") > DEEPEST or "NaN" in text or "Infinity" in text:
            _check_tokens(text)
        row = json.loads(text)
        if "\\u" in text:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode()) + 1
        raise _LineError(f", column {column}: byte 0x{line[error.start]:02x} is not UTF-8") from error
    except UnicodeEncodeError as error:
        raise _LineError(f": {error.object[error.start]!a} is half of a character") from error
    except json.JSONDecodeError as error:
        raise _LineError(f", column {error.colno}: {error.msg}") from error
    except ValueError as error:  # a whole number of thousands of digits
        raise _LineError(f": {str(error).partition(';')[0]}") from error
    if not isinstance(row, dict):
        raise _LineError(f" is {type(row).__name__}; write an object on each line")
    return text, row


def _check_tokens(text: str) -> None:
    depth = 0
    for token in _TOKENS.finditer(text):
        depth += (token[0] in ("[", "{")) - (token[0] in ("]", "}"))
        if depth > DEEPEST:
            raise _LineError(f", column {token.start() + 1}: nested more than {DEEPEST} deep")
        if token[0] in ("NaN", "Infinity", "-Infinity"):
            raise _LineError(f", column {token.start() + 1}: {token[0]} is not JSON; write null, or leave the row out")


def _texts(batch: list[Line], name: str, column: str, where: str) -> pa.Array:
    """Return a column of some rows as text; ``name`` says what it is used for."""
    texts: list[str | None] = []
    problems: list[str] = []
    for line, _, row in batch:
        value = row.get(column)
        try:
            texts.append(value if value is None or isinstance(value, str) else _json_text(value, name))
        except _LineError as error:
            problems.append(f"line {line}: column {column!r} {error}")
    if problems:
        raise ConfigurationError(f"{where}, {'; '.join(problems[:_MOST_PROBLEMS])}")
    return pa.array(texts, pa.string())


def _json_text(value: Any, name: str) -> str:
    if name == CATEGORY:
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _LineError(f"holds {type(value).__name__}; set {COLUMN_SETTINGS[name]} to a column of text or numbers")
    if isinstance(value, float) and not abs(value) < EXACT:
        raise _LineError(
            f"has {value!r}: a number with a fraction or an exponent does not keep every digit from 2^53 on; write it "
            "as a whole number, or as text"
        )
    if isinstance(value, int) or value.is_integer():
        return str(int(value))
    return str(pa.scalar(value).cast(pa.string()))
