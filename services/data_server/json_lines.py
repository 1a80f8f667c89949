"""The rows of a JSON Lines file. Each line is parsed as JSON, so that no value changes on the way: a text that looks
like a date stays text, and a whole number keeps all of its digits."""

from __future__ import annotations

import json
import mmap
import re
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from services.core.errors import ConfigurationError
from services.data_server.columns import CATEGORY, EXACT, SETTINGS, ReadTable, choose
from services.data_server.settings import DataSettings

LARGEST_LINE = 64 * 2**20
DEEPEST = 100
"""Arrays and objects within each other; Python's parser has a limit that depends on its version."""
_BATCH = 4096
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]|-?Infinity|NaN')


def read(path: Path, where: str, settings: DataSettings) -> ReadTable:
    """Return a function that maps the question, answer and category of each row, as text.

    The texts are in a temporary file that has no name, so that a change of ``path`` changes nothing in a run.

    Args:
        path: the file.
        where: the file and its variable, for messages.
        settings: give the columns.

    Raises:
        ConfigurationError: a line is no row, a column is missing, or a value is neither text nor a number.
    """
    names: dict[str, None] = {}
    for _, row in rows(path, where):
        names.update(dict.fromkeys(row))
    chosen = choose(list(names), where, settings)
    schema = pa.schema([(name, pa.string()) for name in chosen])
    numbered = rows(path, where)
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115  # The returned function reads it.
        with pa.ipc.new_stream(file, schema) as writer:
            while batch := list(islice(numbered, _BATCH)):
                columns = [_texts(batch, name, column, where) for name, column in chosen.items()]
                writer.write_batch(pa.record_batch(columns, schema))
        file.flush()
    except OSError as error:
        place = f"{tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a directory with room"
        raise ConfigurationError(f"{where} cannot be copied to {place}") from error
    mapped = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return lambda: pa.ipc.open_stream(mapped).read_all()


def rows(path: Path, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line that is not blank.

    Raises:
        ConfigurationError: a line is too long or nested too deep, is not UTF-8, or is not a JSON object; the message
            has its number, and its column where there is one.
    """
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LARGEST_LINE + 1), b""), 1):
            try:
                row = _object(line, "utf-8-sig" if number == 1 else "utf-8")
            except _LineError as error:
                raise ConfigurationError(
                    f"{where} cannot be read as .jsonl: line {number}{error}; correct the file"
                ) from error
            if row is not None:
                yield number, row


class _LineError(Exception):
    """The message goes on after the number of the line."""


def _object(line: bytes, encoding: str) -> dict[str, Any] | None:
    """Return the object of a line; None for a blank one."""
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
    return row


def _check_tokens(text: str) -> None:
    depth = 0
    for found in _TOKENS.finditer(text):
        depth += (found[0] in ("[", "{")) - (found[0] in ("]", "}"))
        if depth > DEEPEST:
            raise _LineError(f", column {found.start() + 1}: nested more than {DEEPEST} deep")
        if found[0] in ("NaN", "Infinity", "-Infinity"):
            raise _LineError(f", column {found.start() + 1}: {found[0]} is not JSON; write null, or leave the row out")


def _texts(batch: list[tuple[int, dict[str, Any]]], name: str, column: str, where: str) -> pa.Array:
    """Return a column of some rows as text; ``name`` says what it is used for."""
    texts = []
    for line, row in batch:
        value = row.get(column)
        try:
            texts.append(value if value is None or isinstance(value, str) else _text(value, name))
        except _LineError as error:
            raise ConfigurationError(f"{where}, line {line}: column {column!r} {error}") from error
    return pa.array(texts, pa.string())


def _text(value: Any, name: str) -> str:
    if name == CATEGORY:
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _LineError(f"holds {type(value).__name__}; set {SETTINGS[name]} to a column of text or numbers")
    if isinstance(value, float) and not abs(value) < EXACT:
        raise _LineError(
            f"has {value!r}: a number with a fraction or an exponent does not keep every digit from 2^53 on; write it "
            "as a whole number, or as text"
        )
    if isinstance(value, int) or value.is_integer():
        return str(int(value))
    return str(pa.scalar(value).cast(pa.string()))
