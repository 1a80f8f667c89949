"""The files that DATASET and DATASET_TEST may name."""

from __future__ import annotations

import json
from pathlib import Path

from services.core.errors import ConfigurationError
from services.data_server.settings import DataSettings

FILE_TYPES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""The reader of datasets for each ending."""


def is_path(dataset: str) -> bool:
    """Return whether DATASET names a file: a dataset on the hub has one slash at most, and no file's ending."""
    return Path(dataset).suffix in FILE_TYPES or dataset.startswith(("/", "./", "../", "~")) or dataset.count("/") > 1


def named_files(settings: DataSettings) -> dict[str, Path]:
    """Return the files that the settings name, by variable; none for a generator or a dataset on the hub.

    Raises:
        ConfigurationError: DATASET_TEST names a file beside a DATASET that is none.
    """
    if not is_path(settings.dataset):
        if settings.dataset_test is not None:
            raise ConfigurationError(
                f"DATASET_TEST is {str(settings.dataset_test)!r}, but DATASET {settings.dataset!r} is no file; leave "
                "out DATASET_TEST (DATASET_TEST_SPLIT names the held-out split of a dataset on the hub)"
            )
        return {}
    held_out = {"DATASET_TEST": settings.dataset_test} if settings.dataset_test else {}
    return {"DATASET": Path(settings.dataset)} | held_out


def check_file(variable: str, path: Path) -> None:
    """Check that ``path``, the value of ``variable``, is a file that may have rows, without reading it.

    Raises:
        ConfigurationError: it has another ending, does not exist or is empty.
    """
    if path.suffix not in FILE_TYPES:
        raise ConfigurationError(f"{variable} {str(path)!r}: allowed are files that end in {', '.join(FILE_TYPES)}")
    if not path.is_file() or path.stat().st_size == 0:
        raise ConfigurationError(
            f"{variable} {str(path)!r} is not a file with rows, seen from {Path.cwd()}; give the path of one"
        )


def syntax_error(path: Path) -> str | None:
    """Return the first line of a file of JSON lines that is no JSON, and why; None where there is none such."""
    if path.suffix != ".jsonl":
        return None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                json.loads(line if line.strip() else "{}")
            except json.JSONDecodeError as error:
                return f"line {number}, column {error.colno}: {error.msg}"
            except UnicodeDecodeError as error:
                return f"line {number}: {error}"
    return None
