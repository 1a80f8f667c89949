"""The rows of Parquet files and of datasets on the Hugging Face hub, which have a schema, as Arrow tables."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from services.core.errors import ConfigurationError, first_line
from services.data_server.columns import EXACT, SETTINGS, ReadTable, choose
from services.data_server.settings import DataSettings

GSM8K = "openai/gsm8k"
_EXACT = {16: 2.0**11, 32: 2.0**24, 64: EXACT}
"""The same bound for floating-point numbers of that many bits."""


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
    # As above: no network, no such dataset, no access, a wrong configuration name, a broken cache, ...
    except Exception as error:
        raise ConfigurationError(
            f"{where}{f' ({config})' if config else ''} cannot be loaded from the Hugging Face hub or its cache: "
            f"{type(error).__name__}: {first_line(error)}; check its name and the network, or set DATASET to a .jsonl "
            f"or .parquet file or to arithmetic"
        ) from error

    wanted = {"dataset_train_split", *({"dataset_test_split"} & settings.model_fields_set)}
    for setting in sorted(wanted):
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
    chosen = choose(table.column_names, where, settings)
    for name, setting in SETTINGS.items():
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
    row = pc.index(pc.invert(pc.less(pc.abs(values), _EXACT[column.type.bit_width])), True).as_py()
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
