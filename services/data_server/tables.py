"""The rows of Parquet files, of JSON Lines and of datasets on the Hugging Face hub, as Arrow tables.

Parquet and the hub's datasets have a schema. Each line of JSON Lines is parsed as JSON, so that no value changes on the
way: a text that looks like a date stays text, and a whole number keeps all of its digits.
"""

from __future__ import annotations

import json
import logging
import mmap
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from services.core.errors import ConfigurationError, first_line
from services.data_server.settings import DataSettings

_QUESTION = ("question", "prompt", "problem")
_ANSWER = ("answer", "ground_truth", "solution")

ReadTable = Callable[[], pa.Table]
"""A function that maps the columns of a split into memory again at each call: question, answer, perhaps ground_truth
(otherwise read from the answers) and category. Once an earlier table is gone, the pages that it read no longer count as
this process's memory."""
CATEGORY = "category"
EXACT = 2.0**53
"""Below it, every whole number has a double of its own."""
COLUMN_SETTINGS = {"question": "PROMPT_COLUMN", "answer": "GROUND_TRUTH_COLUMN"}
"""The settings that name the columns whose values must be text or numbers."""


def choose_columns(names: Sequence[str], where: str, settings: DataSettings) -> dict[str, str]:
    """Return the columns of question, answer and perhaps category, as ``{"question": ..., "answer": ...}``.

    Args:
        names: the columns of the dataset.
        where: the dataset, for messages, such as ``DATASET 'rows.jsonl'``.
        settings: give the columns, or leave them to the usual names.

    Raises:
        ConfigurationError: the dataset lacks a column.
    """
    question = _choose(names, where, "PROMPT_COLUMN", settings.prompt_column, _QUESTION)
    if list(names) == [question] and settings.ground_truth_column is None:
        raise ConfigurationError(f"{where} has no column but {question!r}; add one with the answers, such as 'answer'")
    chosen = {
        "question": question,
        "answer": _choose(names, where, "GROUND_TRUTH_COLUMN", settings.ground_truth_column, _ANSWER),
    }
    return chosen | ({CATEGORY: CATEGORY} if CATEGORY in names else {})


def _choose(names: Sequence[str], where: str, setting: str, column: str | None, usual: tuple[str, ...]) -> str:
    if column is not None and column not in names:
        raise ConfigurationError(f"{setting} is {column!r}, which {where} lacks; it has {list(names)}")
    chosen = column or next((name for name in usual if name in names), None)
    if chosen is None:
        raise ConfigurationError(
            f"{where} has none of the columns {', '.join(usual)}; set {setting} to one of {list(names)}"
        )
    return chosen


GSM8K = "openai/gsm8k"
_EXACT_FLOATS = {16: 2.0**11, 32: 2.0**24, 64: EXACT}
"""The same bound by the number of bits of a floating-point type."""


def read_parquet(path: Path, where: str, settings: DataSettings) -> ReadTable:
    """Return a function that maps the rows of a Parquet file.

    Args:
        path: the file.
        where: the file and its variable, for messages.
        settings: give the columns.

    Raises:
        ConfigurationError: the file cannot be read, or a column is missing or has values that cannot be used.
    """
    try:
        loaded = _datasets().load_dataset("parquet", data_files={"rows": str(path.resolve())}, split="rows")
    # datasets lets through a dozen kinds of errors of its readers; any of them means that the file cannot be used.
    except Exception as error:
        reason = first_line(error.__cause__ or error)
        raise ConfigurationError(f"{where} cannot be read as {path.suffix}: {reason}; correct the file") from error
    return open_table(loaded, where, settings)


def hub_name(settings: DataSettings) -> tuple[str, str | None]:
    """Return a dataset's name on the hub, and that of its configuration."""
    if settings.dataset.lower() in ("gsm8k", GSM8K):
        return GSM8K, settings.dataset_config or "main"
    return settings.dataset, settings.dataset_config


def load_from_hub(settings: DataSettings, first: int | None = None) -> tuple[ReadTable, ReadTable | None]:
    """Return functions that map the rows of a dataset's training split and of its held-out split, None without one.

    Args:
        settings: name the dataset, its splits and its columns.
        first: the number of rows that are read of each split, without a download of the others; None: all.

    Raises:
        ConfigurationError: the dataset or a split cannot be loaded, or a column is missing or cannot be used.
    """
    dataset, config = hub_name(settings)
    where = f"DATASET {dataset!r}"
    try:
        loaded = _datasets().load_dataset(dataset, config, streaming=first is not None)
    # As above, of any type: no network, no such dataset, no access, a wrong configuration name, a broken cache, ...
    except Exception as error:
        raise ConfigurationError(
            f"{where}{f' ({config})' if config else ''} cannot be loaded from the Hugging Face hub or its cache: "
            f"{type(error).__name__}: {first_line(error)}; check its name and the network, or set DATASET to a .jsonl "
            f"or .parquet file or to arithmetic"
        ) from error

    split_settings = {"dataset_train_split", *({"dataset_test_split"} & settings.model_fields_set)}
    for setting in sorted(split_settings):
        if getattr(settings, setting) not in loaded:
            raise ConfigurationError(
                f"{where} has no split {getattr(settings, setting)!r}; set {setting.upper()} to one of {sorted(loaded)}"
            )
    splits = [loaded.get(name) for name in (settings.dataset_train_split, settings.dataset_test_split)]
    if first is not None:
        splits = [split and _datasets().Dataset.from_list(list(split.take(first)), split.features) for split in splits]
    train, test = splits
    return open_table(train, where, settings), None if test is None else open_table(test, where, settings)


def open_table(dataset: Any, where: str, settings: DataSettings) -> ReadTable:
    """Return a function that maps the columns of a ``datasets.Dataset``, with numbers as text.

    Raises:
        ConfigurationError: a column is missing, holds another type, or has numbers that are not exact.
    """
    table = dataset.data.table
    chosen = choose_columns(table.column_names, where, settings)
    for name, setting in COLUMN_SETTINGS.items():
        _check_type(table[chosen[name]], f"{where}: column {chosen[name]!r}", setting)
    files = [file["filename"] for file in dataset.cache_files]

    def read() -> pa.Table:
        whole = pa.concat_tables(_datasets().Dataset.from_file(file).data.table for file in files) if files else table
        return pa.table({name: _as_text(whole[column]) for name, column in chosen.items()})

    return read


def _check_type(column: pa.ChunkedArray, which: str, setting: str) -> None:
    allowed = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer, pa.types.is_floating)
    if not any(fits(column.type) for fits in allowed):
        raise ConfigurationError(f"{which} holds {column.type}; set {setting} to a column of text or numbers")
    if not pa.types.is_floating(column.type):
        return
    values = column.cast(pa.float64())
    row = pc.index(pc.invert(pc.less(pc.abs(values), _EXACT_FLOATS[column.type.bit_width])), True).as_py()
    if row >= 0:
        raise ConfigurationError(
            f"{which} holds {column.type}, and row {row} (from 0) has {values[row]}, of which that type does not keep "
            "every digit; store the column as text or as whole numbers, or leave the row out"
        )


def _as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return floating-point numbers as text, whole ones without an exponent; other columns are text already."""
    if not pa.types.is_floating(column.type):
        return column
    texts, values = pc.cast(column, pa.string()), column.cast(pa.float64())
    is_whole = pc.and_(pc.equal(values, pc.floor(values)), pc.match_substring(texts, "e"))
    return pc.if_else(is_whole, pc.cast(pc.cast(values, pa.int64(), safe=False), pa.string()), texts)


def _datasets() -> Any:
    """Import and return datasets, which takes a second and which generated questions do not need."""
    import datasets

    # Each retry would be a warning, printed twice. The last error is in our own message, with the line of the file.
    datasets.utils.logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    return datasets


LARGEST_LINE = 64 * 2**20
DEEPEST = 100
"""Arrays and objects within each other; Python's parser has a limit that depends on its version."""
_ROWS_A_BATCH = 4096
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]|-?Infinity|NaN')


def read_json_lines(path: Path, where: str, settings: DataSettings) -> ReadTable:
    """Return a function that maps the question, answer and category of each row, as text.

    The texts are in a temporary file that has no name, so that a change of ``path`` does not affect a run.

    Args:
        path: the file.
        where: the file and its variable, for messages.
        settings: give the columns.

    Raises:
        ConfigurationError: a line is not a row, a column is missing, or a value is neither text nor a number.
    """
    names: dict[str, None] = {}
    for _, row in json_rows(path, where):
        names.update(dict.fromkeys(row))
    chosen = choose_columns(list(names), where, settings)
    schema = pa.schema([(name, pa.string()) for name in chosen])
    numbered = json_rows(path, where)
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115  # The returned function reads it.
        with pa.ipc.new_stream(file, schema) as writer:
            while batch := list(islice(numbered, _ROWS_A_BATCH)):
                columns = [_texts(batch, name, column, where) for name, column in chosen.items()]
                writer.write_batch(pa.record_batch(columns, schema))
        file.flush()
    except OSError as error:
        place = f"{tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a directory with room"
        raise ConfigurationError(f"{where} cannot be copied to {place}") from error
    mapped = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return lambda: pa.ipc.open_stream(mapped).read_all()


def json_rows(path: Path, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
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
    """An error of a line; the message continues a sentence behind the line's number."""


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
    for token in _TOKENS.finditer(text):
        depth += (token[0] in ("[", "{")) - (token[0] in ("]", "}"))
        if depth > DEEPEST:
            raise _LineError(f", column {token.start() + 1}: nested more than {DEEPEST} deep")
        if token[0] in ("NaN", "Infinity", "-Infinity"):
            raise _LineError(f", column {token.start() + 1}: {token[0]} is not JSON; write null, or leave the row out")


def _texts(batch: list[tuple[int, dict[str, Any]]], name: str, column: str, where: str) -> pa.Array:
    """Return a column of some rows as text; ``name`` says what it is used for."""
    texts = []
    for line, row in batch:
        value = row.get(column)
        try:
            texts.append(value if value is None or isinstance(value, str) else _json_text(value, name))
        except _LineError as error:
            raise ConfigurationError(f"{where}, line {line}: column {column!r} {error}") from error
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
