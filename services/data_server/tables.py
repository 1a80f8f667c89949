"""The rows of JSON Lines, of Parquet files and of datasets on the Hugging Face hub, as Arrow tables; checks of columns.

A line of JSON Lines is kept as it is, so that no value changes on the way: a text that looks like a date stays text,
1 and "1" differ, an absent key is not null, and a whole number keeps all of its digits.
"""

from __future__ import annotations

import functools
import json
import logging
import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from services import reward_columns
from services.core.errors import ConfigurationError, first_line
from services.core.logs import get_logger
from services.core.settings import Method
from services.data_server.settings import DataSettings
from services.http.json_body import json_depth

log = get_logger(__name__)

_QUESTION = ("question", "prompt", "problem")
_ANSWER = ("answer", "ground_truth", "solution")


@dataclass(frozen=True)
class ReadTable:
    """A function that maps the columns of a split into memory again at each call.

    They are question, perhaps answer, ground_truth (otherwise read from the answers), category, and the whole row as
    JSON, which is also the question of rows to learn as they are. Once an earlier table is gone, the pages that it read
    no longer count as this process's memory.
    """

    read: Callable[[], pa.Table]
    columns: Sequence[str] = ()
    """The columns of whole rows; none where these do not travel."""
    shadowed: Sequence[str] = ()
    """Columns that rewards reach only through `row`, because their names are reserved."""
    has_demonstrations: bool = False
    """True if the rows are learned as they are (METHOD=sft)."""

    def __call__(self) -> pa.Table:
        """Return the table."""
        table = self.read()
        return table.append_column("question", table[ROW]) if self.has_demonstrations else table


CATEGORY = "category"
ROW = "row"
"""The column of a row's JSON; null if that is too large, empty if it has NaN or infinity."""
MEDIA = "media"
"""The column that says whether a row has an image, a sound or a video; absent where no column is of their names."""
_MEDIA_COLUMNS = frozenset({"image", "images", "audio", "audios", "video", "videos"})
_ROWS_AT_ONCE = 1024
"""Rows that are made JSON at once."""
EXACT = 2.0**53
"""Below it, every whole number has a double of its own."""
COLUMN_SETTINGS = {"question": "PROMPT_COLUMN", "answer": "GROUND_TRUTH_COLUMN"}
"""The settings that name the columns whose values must be text or numbers."""


def choose_columns(names: Sequence[str], where: str, settings: DataSettings) -> dict[str, str]:
    """Return the columns of question, category and answer, as ``{"question": ..., "answer": ...}``.

    Category may be missing, and so may the answer if no reward reads a ground truth. Rows to learn as they are have no
    question.

    Args:
        names: the columns of the dataset.
        where: the dataset, for messages, such as ``DATASET 'rows.jsonl'``.
        settings: give the columns, or leave them to the usual names.

    Raises:
        ConfigurationError: the dataset lacks a column, also one that a reward function or AGENT_COLUMNS needs.
    """
    check_columns(names, where, settings)
    category = {CATEGORY: CATEGORY} if CATEGORY in names else {}
    if has_demonstrations(names, settings):
        answers = (name for name in (settings.ground_truth_column, *_ANSWER) if name and name in names)
        return ({"answer": answer} if (answer := next(answers, None)) else {}) | category
    chosen = {"question": _choose(names, where, "PROMPT_COLUMN", settings.prompt_column, _QUESTION)}
    if settings.needs_truth or settings.ground_truth_column is not None or set(_ANSWER).intersection(names):
        if list(names) == [*chosen.values()] and settings.ground_truth_column is None:
            raise ConfigurationError(f"{where} has the column {names[0]!r} alone; add one with the answers")
        chosen["answer"] = _choose(names, where, "GROUND_TRUTH_COLUMN", settings.ground_truth_column, _ANSWER)
    return chosen | category


def has_demonstrations(names: Sequence[str], settings: DataSettings) -> bool:
    """Return whether rows with these columns are learned as they are."""
    prompt = settings.prompt_column or "prompt"
    return settings.method is Method.SFT and ("messages" in names or {prompt, "completion"}.issubset(names))


def check_columns(names: Sequence[str], where: str, settings: DataSettings) -> None:
    """Check that the rows have the columns that reward functions and AGENT_COLUMNS need.

    Raises:
        ConfigurationError: they lack one; the message has those that are there.
    """
    reward_columns.check_columns(settings.reward_fn, names, where, settings.judge_rubric)
    if missing := [name for name in settings.visible_columns if name not in names]:
        there = reward_columns.describe(names)
        raise ConfigurationError(f"AGENT_COLUMNS names {', '.join(missing)}, which {where} lacks; {there}")


def row_columns(names: Sequence[str], chosen: dict[str, str], settings: DataSettings) -> dict[str, Any]:
    """Return ``ReadTable``'s fields about columns; without any if rows need not travel whole.

    They travel if they have further columns, or if somebody reads a column.
    """
    if has_demonstrations(names, settings):
        return {"columns": names, "has_demonstrations": True}
    is_read = bool(settings.visible_columns) or any(part.has_row for part in settings.reads.values())
    further = [name for name in names if name not in chosen.values()]
    if not is_read and not further:
        return {}
    return {"columns": names, "shadowed": sorted(reward_columns.RESERVED.intersection(further))}


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
        size = pq.read_metadata(path).num_rows
        loaded = size and _datasets().load_dataset("parquet", data_files={"rows": str(path.resolve())}, split="rows")
    # datasets lets through a dozen kinds of errors of its readers; any of them means that the file cannot be used.
    except Exception as error:
        reason = first_line(error.__cause__ or error)
        raise ConfigurationError(f"{where} cannot be read as {path.suffix}: {reason}; correct the file") from error
    if not size:
        raise ConfigurationError(f"{where} has no rows; give a file with a question and an answer in each row")
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
    names = [name for name in table.column_names if _has_json(table.schema.field(name).type)]
    if left_out := sorted(set(table.column_names).difference(names)):
        log.warning("columns that cannot be JSON are left out of the rows", dataset=where, columns=left_out)
    chosen = choose_columns(names, where, settings)
    for name, setting in COLUMN_SETTINGS.items():
        if name in chosen:
            _check_type(table[chosen[name]], f"{where}: column {chosen[name]!r}", setting)
    files = [file["filename"] for file in dataset.cache_files]
    read_rows = None
    if of_rows := row_columns(names, chosen, settings):
        read_rows = on_disk(
            _row_batches(dataset.select_columns(names), settings.largest_row), pa.schema([(ROW, pa.string())]), where
        )

    def read() -> pa.Table:
        whole = pa.concat_tables(_datasets().Dataset.from_file(file).data.table for file in files) if files else table
        columns = {name: _as_text(whole[column]) for name, column in chosen.items()}
        columns |= _has_media(whole)
        return pa.table(columns | ({ROW: read_rows()[ROW]} if read_rows is not None else {}))

    return ReadTable(read, **of_rows)


def _has_media(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Return the column MEDIA, if a column has the name of such values."""
    masks = []
    for name in sorted(_MEDIA_COLUMNS.intersection(table.column_names)):
        values = table[name]
        is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
        has_some = pc.greater(pc.list_value_length(values), 0) if is_list else pc.is_valid(values)
        masks.append(pc.fill_null(has_some, False))
    return {MEDIA: functools.reduce(pc.or_, masks)} if masks else {}


def _has_json(kind: pa.DataType) -> bool:
    """Return whether the values of a type have a form in JSON; images and sounds, for one, are binary."""
    if pa.types.is_nested(kind):
        return not pa.types.is_union(kind) and all(_has_json(kind.field(i).type) for i in range(kind.num_fields))
    if pa.types.is_dictionary(kind):
        return _has_json(kind.value_type)
    unknown = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return not any(fits(kind) for fits in (*unknown, pa.types.is_duration, pa.types.is_interval))


def _row_batches(dataset: Any, most: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a ``datasets.Dataset`` as JSON of at most ``most`` bytes.

    Dates and times become text as in ISO 8601, decimal numbers text with all of their digits, and a floating-point
    number the JSON number of the same value. Null stays null: such a dataset knows no absent columns.
    """
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        columns = dataset[start : start + _ROWS_AT_ONCE]
        rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        yield pa.record_batch([pa.array([_row_text(row, most) for row in rows], pa.string())], [ROW])


def _row_text(row: dict[str, Any], most: int) -> str | None:
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_as_json)
    except ValueError:  # NaN or infinity
        return ""
    return bounded(text, most)


def bounded(text: str, most: int) -> str | None:
    """Return a row's JSON; None if it has more than ``most`` bytes."""
    return None if len(text) > most or len(text.encode()) > most else text


def _as_json(value: Any) -> str:
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _check_type(column: pa.ChunkedArray, which: str, setting: str) -> None:
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    numbers = (pa.types.is_integer, pa.types.is_decimal, pa.types.is_floating)
    if not any(fits(column.type) for fits in (*texts, *numbers)):
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


def on_disk(batches: Iterator[pa.RecordBatch], schema: pa.Schema, where: str) -> Callable[[], pa.Table]:
    """Write rows to a temporary file that has no name, and return a function that maps them."""
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115  # The returned function reads it.
        with pa.ipc.new_stream(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        file.flush()
    except OSError as error:
        place = f"{tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a directory with room"
        raise ConfigurationError(f"{where} cannot be copied to {place}") from error
    mapped = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return lambda: pa.ipc.open_stream(mapped).read_all()


# --- JSON Lines -------------------------------------------------------------------------------------------------------

LARGEST_LINE = 64 * 2**20
DEEPEST = 100
"""Arrays and objects within each other; Python's parser has a limit that depends on its version."""
_ROWS_A_BATCH = 4096
_BATCH_CHARACTERS = 2**24


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
    media = _MEDIA_COLUMNS.intersection(names)
    fields = [(name, pa.string()) for name in [*chosen, *([ROW] if of_rows else [])]]
    schema = pa.schema(fields + ([(MEDIA, pa.bool_())] if media else []))

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in _batches(json_rows(path, where)):
            columns = [_texts(batch, name, column, where) for name, column in chosen.items()]
            if of_rows:
                columns.append(pa.array([bounded(line.text, settings.largest_row) for line in batch], pa.string()))
            if media:
                columns.append(pa.array([any(map(line.row.get, media)) for line in batch], pa.bool_()))
            yield pa.record_batch(columns, schema)

    return ReadTable(on_disk(batches(), schema, where), **of_rows)


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
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LARGEST_LINE + 1), b""), 1):
            try:
                if text := line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip():
                    yield Line(number, text, _object(text))
            except UnicodeDecodeError as error:
                column = len(line[: error.start].decode()) + 1
                problem = f"line {number}, column {column}: byte 0x{line[error.start]:02x} is not UTF-8"
            except orjson.JSONDecodeError as error:
                problem = f"line {number}, column {error.colno}: {error.msg.partition(': line ')[0]}"
            except ValueError as error:
                problem = f"line {number} {str(error).partition(';')[0]}"
            else:
                continue
            raise ConfigurationError(f"{where} cannot be read as .jsonl: {problem}; correct the file")


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
    for line, _, row in batch:
        value = row.get(column)
        try:
            texts.append(value if value is None or isinstance(value, str) else _json_text(value, name))
        except ValueError as error:
            raise ConfigurationError(f"{where}, line {line}: column {column!r} {error}") from error
    return pa.array(texts, pa.string())


def _json_text(value: Any, name: str) -> str:
    if name == CATEGORY:
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"holds {type(value).__name__}; set {COLUMN_SETTINGS[name]} to a column of text or numbers")
    if isinstance(value, float) and not abs(value) < EXACT:
        raise ValueError(
            f"has {value!r}, which does not keep every digit from 2^53 on; write it as a whole number, or as text"
        )
    if isinstance(value, int) or value.is_integer():
        return str(int(value))
    return str(pa.scalar(value).cast(pa.string()))
