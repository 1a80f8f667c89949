"""The columns of a dataset that have its questions and its answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from services.core.errors import ConfigurationError
from services.data_server.settings import DataSettings

_QUESTION = ("question", "prompt", "problem")
_ANSWER = ("answer", "ground_truth", "solution")
_FIRST_ROWS = 1000


def choose(names: Sequence[str], where: str, settings: DataSettings) -> dict[str, str]:
    """Return the columns of question and answer, as ``{"question": ..., "answer": ...}``.

    Args:
        names: the columns of the dataset.
        where: the dataset, for messages, such as ``DATASET 'rows.jsonl'``.
        settings: give the columns, or leave them to the usual names.

    Raises:
        ConfigurationError: the dataset lacks a column.
    """
    return {
        "question": _choose(names, where, "PROMPT_COLUMN", settings.prompt_column, _QUESTION),
        "answer": _choose(names, where, "GROUND_TRUTH_COLUMN", settings.ground_truth_column, _ANSWER),
    }


def check_columns(variable: str, path: Path, settings: DataSettings) -> None:
    """Check that the file ``path``, the value of ``variable``, has the columns, by its schema or its first rows.

    Raises:
        ConfigurationError: it lacks a column.
    """
    names = _columns_of(path)
    if names is not None:
        choose(names, f"{variable} {str(path)!r}", settings)


def _choose(names: Sequence[str], where: str, setting: str, given: str | None, usual: tuple[str, ...]) -> str:
    if given is not None and given not in names:
        raise ConfigurationError(f"{setting} is {given!r}, which {where} lacks; it has {list(names)}")
    found = given or next((name for name in usual if name in names), None)
    if found is None:
        raise ConfigurationError(
            f"{where} has none of the columns {', '.join(usual)}; set {setting} to one of {list(names)}"
        )
    return found


def _columns_of(path: Path) -> list[str] | None:
    """Return the columns of a file; None where its first lines are no JSON objects, which only its reader explains."""
    if path.suffix == ".parquet":
        # Parquet takes a quarter of a second to import.
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return list(pq.read_schema(path).names)
        except (pa.ArrowException, OSError):
            return None
    names: dict[str, None] = {}
    with path.open("rb") as file:
        for line in itertools.islice(file, _FIRST_ROWS):
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError:
                return None
            if not isinstance(row, dict):
                return None
            names.update(dict.fromkeys(row))
    return list(names)
