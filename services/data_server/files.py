"""The files that DATASET and DATASET_TEST may name."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from services.core.errors import ConfigurationError
from services.data_server.settings import DataSettings
from services.protocol.ground_truths import REASONING_GYM

FILE_TYPES = (".jsonl", ".parquet")
_READ = {
    ".csv": 'csv.DictReader(open({old}, encoding="utf-8-sig", newline=""))',
    ".tsv": 'csv.DictReader(open({old}, encoding="utf-8-sig", newline=""), delimiter="\\t")',
    ".json": 'json.load(open({old}, encoding="utf-8"))',
}
"""Python that reads the rows of other kinds of files, for the command that writes them as JSON Lines."""
_CONVERT = 'import csv, json; open({new}, "w").writelines(json.dumps(row) + "\\n" for row in {rows})'


def is_path(dataset: str) -> bool:
    """Return whether DATASET names a file: a dataset on the hub has one slash at most, and no file's ending."""
    is_named_so = Path(dataset).suffix in (*FILE_TYPES, *_READ) or dataset.startswith(("/", "./", "../", "~"))
    return is_named_so or dataset.count("/") > 1 or os.path.isfile(dataset)


def is_on_hub(dataset: str) -> bool:
    """Return whether DATASET names a dataset on the Hugging Face hub."""
    return not is_path(dataset) and dataset not in ("arithmetic", "seeds") and not dataset.startswith(REASONING_GYM)


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
    """Check that ``path``, the value of ``variable``, is a file that may have rows, by its name and its first byte.

    Raises:
        ConfigurationError: it cannot be read, is empty, or is of another kind; the message has the command that
            converts it.
    """
    where = f"{variable} {str(path)!r}"
    try:
        with path.open("rb") as file:
            first = file.read(1)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{where} is not a file, seen from {Path.cwd()}; give the path of one") from error
    except OSError as error:
        raise ConfigurationError(f"{where} cannot be read ({error.strerror}); give a file that can be") from error
    if path.suffix not in FILE_TYPES:
        allowed = f"{where}: allowed are files that end in {' or '.join(FILE_TYPES)}"
        raise ConfigurationError(f"{allowed}; {_remedy(path, first)}" if path.suffix in _READ else allowed)
    if not first:
        raise ConfigurationError(f"{where} is empty; write a JSON object a line, with a question and an answer")


def _remedy(path: Path, first: bytes) -> str:
    """Return the command that makes JSON Lines of a file."""
    new = path.with_suffix(".jsonl")
    if path.suffix == ".json" and first == b"{":
        return f"if each line is an object, rename it: {shlex.join(['mv', str(path), str(new)])}"
    rows = _READ[path.suffix].format(old=json.dumps(str(path)))
    code = _CONVERT.format(new=json.dumps(str(new)), rows=rows)
    return f"convert it: {shlex.join(['python3', '-c', code])}"
