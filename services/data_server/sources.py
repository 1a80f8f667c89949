"""Where prompts come from: one interface over the generator, local files and the Hugging Face hub.

Rows stay in memory-mapped Arrow tables, so that a million of them cost little memory; only their ground truths and
the numbers of the rows that qualify are held.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from services.core.errors import ConfigurationError
from services.data_server import arithmetic
from services.data_server.settings import DataSettings, GroundTruthFormat

GSM8K = "openai/gsm8k"
GSM8K_CONFIG = "main"
FILE_TYPES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}

_PROMPT_COLUMNS = ("question", "prompt", "problem")
_GROUND_TRUTH_COLUMNS = ("answer", "ground_truth", "solution")
_AFTER_HASHES = r"(?s)^.*####[ \t]*(?P<truth>[^\n]*)"
_DIGESTED_ROWS = 10_000
_GROUPED_NUMBER = r"^[-+]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?$"


@dataclass(frozen=True)
class Row:
    """One row that qualifies: its number in the source, the question, its answer in full, and the ground truth."""

    number: int
    question: str
    answer: str
    ground_truth: str
    category: str | None


class Rows:
    """The rows of one split that have a question and a ground truth, in the order of the source."""

    def __init__(
        self, table: pa.Table, truths: pa.ChunkedArray, numbers: np.ndarray[Any, np.dtype[np.int32]], content: str
    ) -> None:
        """Takes a table with the columns question, answer and perhaps category, and a digest of its content."""
        self._table = datasets.table.InMemoryTable(table)
        self._truths = truths.combine_chunks()
        self.numbers = numbers
        self._content = content
        self._has_category = "category" in table.column_names

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, places: list[int]) -> list[Row]:
        """The rows at ``places`` (0 to len - 1), in that order."""
        numbers = [int(self.numbers[place]) for place in places]
        columns = self._table.fast_gather(numbers).to_pydict()
        categories = columns["category"] if self._has_category else [None] * len(places)
        return [
            Row(
                number,
                question,
                str(answer),
                self._truths[number].as_py(),
                None if category is None else str(category),
            )
            for number, question, answer, category in zip(
                numbers, columns["question"], columns["answer"], categories, strict=True
            )
        ]

    def select(self, places: np.ndarray[Any, Any] | slice) -> Rows:
        """The same rows, but only those at ``places``."""
        chosen = Rows.__new__(Rows)
        chosen._table, chosen._truths, chosen._has_category = self._table, self._truths, self._has_category
        chosen._content = self._content
        chosen.numbers = self.numbers[places]
        return chosen

    def digest(self) -> str:
        """Return a digest of the source's questions and ground truths in their order, and of which rows these are."""
        return hashlib.blake2b(self._content.encode() + self.numbers.tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Opened:
    """A split that can be read: which columns of which Arrow files, or of a table in memory."""

    files: tuple[str, ...]
    in_memory: pa.Table | None
    columns: dict[str, str]

    def table(self) -> pa.Table:
        """The columns question, answer and perhaps category, mapped anew: pages read so far no longer count as ours."""
        if self.in_memory is not None:
            table = self.in_memory
        else:
            table = pa.concat_tables(datasets.Dataset.from_file(file).data.table for file in self.files)
        return pa.table({name: table[column] for name, column in self.columns.items()})


@dataclass(frozen=True)
class Source:
    """Rows to train on, rows held out, how their ground truths are written, and how many were left out, by reason."""

    name: str
    ground_truth_format: GroundTruthFormat
    train: Rows
    test: Rows
    refused: dict[str, int]


def load(settings: DataSettings) -> Source:
    """Loads what DATASET names.

    Raises:
        ConfigurationError: it cannot be had, lacks a column, or no row of it qualifies.
    """
    train: Opened
    test: Opened | None
    if settings.dataset == "arithmetic":
        train, test = _arithmetic(settings)
        name = "arithmetic"
    elif is_path(settings.dataset):
        train, test = _files(settings)
        name = Path(settings.dataset).stem
    else:
        train, test = _hub(settings)
        name = settings.dataset.rpartition("/")[2]
    form = _format(train, settings)
    refused: Counter[str] = Counter()
    train_rows = _rows(train, form, refused)
    if test is None:
        train_rows, test_rows = _hold_out(train_rows, settings)
    else:
        test_rows = _rows(test, form, refused)
    for rows, split in ((train_rows, "training"), (test_rows, "held-out")):
        if len(rows) == 0:
            raise ConfigurationError(
                f"DATASET {settings.dataset!r} has no {split} row with a question and a ground truth "
                f"(left out: {dict(refused)}); check the columns and GROUND_TRUTH_FORMAT"
            )
    return Source(name, form, train_rows, test_rows, dict(refused))


def is_path(dataset: str) -> bool:
    """Whether DATASET names a file."""
    # "owner/name" on the hub has one slash and no file's ending.
    return Path(dataset).suffix in FILE_TYPES or dataset.startswith(("/", "./", "../", "~")) or dataset.count("/") > 1


def _arithmetic(settings: DataSettings) -> tuple[Opened, Opened]:
    train, held_out = arithmetic.questions(
        digits=[int(digit) for digit in settings.arithmetic_digits.split(",")],
        operations=settings.arithmetic_operations,
        template=settings.arithmetic_template,
        seed=settings.data_seed,
    )
    return _question_table(train), _question_table(held_out)


def _question_table(questions: list[arithmetic.Question]) -> Opened:
    table = pa.table(
        {
            "question": [q.text for q in questions],
            "answer": [q.answer for q in questions],
            "category": [q.category for q in questions],
        }
    )
    return Opened((), table, {name: name for name in table.column_names})


def _files(settings: DataSettings) -> tuple[Opened, Opened | None]:
    train = _load_file(Path(settings.dataset), "DATASET", settings)
    if settings.dataset_test is None:
        return train, None
    return train, _load_file(settings.dataset_test, "DATASET_TEST", settings)


def _load_file(path: Path, setting: str, settings: DataSettings) -> Opened:
    if path.suffix not in FILE_TYPES:
        raise ConfigurationError(f"{setting} {str(path)!r}: allowed are files that end in {', '.join(FILE_TYPES)}")
    if not path.is_file():
        raise ConfigurationError(
            f"{setting} {str(path)!r} is not a file, seen from {Path.cwd()}; give the path of a file that exists"
        )
    if path.stat().st_size == 0:
        raise ConfigurationError(f"{setting} {str(path)!r} is empty; give a file with one row a line")
    cache = None if settings.dataset_cache_dir is None else str(settings.dataset_cache_dir)
    try:
        loaded = datasets.load_dataset(
            FILE_TYPES[path.suffix], data_files={"rows": str(path.resolve())}, split="rows", cache_dir=cache
        )
    # datasets lets through what its readers raise, of a dozen kinds; whichever it is, the file cannot be used.
    except Exception as error:
        cause = error.__cause__ or error
        raise ConfigurationError(
            f"{setting} {str(path)!r} cannot be read as {path.suffix}: {_first_line(cause)}; correct the file"
        ) from error
    return _open(loaded, f"{setting} {str(path)!r}", settings)


def _hub(settings: DataSettings) -> tuple[Opened, Opened | None]:
    is_gsm8k = settings.dataset.lower() in ("gsm8k", GSM8K)
    dataset = GSM8K if is_gsm8k else settings.dataset
    config = settings.dataset_config or (GSM8K_CONFIG if is_gsm8k else None)
    cache = None if settings.dataset_cache_dir is None else str(settings.dataset_cache_dir)
    try:
        loaded = datasets.load_dataset(dataset, config, cache_dir=cache)
    # As above: no network, no such dataset, no access, a wrong configuration name, a broken cache, ...
    except Exception as error:
        raise ConfigurationError(
            f"DATASET {dataset!r}{f' ({config})' if config else ''} cannot be loaded from the Hugging Face hub or its "
            f"cache: {_first_line(error)}; check its name and the network, or set DATASET to a .jsonl or .parquet file "
            f"or to arithmetic"
        ) from error
    where = f"DATASET {dataset!r}"
    if settings.dataset_train_split not in loaded:
        raise ConfigurationError(
            f"{where} has no split {settings.dataset_train_split!r}; set DATASET_TRAIN_SPLIT to one of {sorted(loaded)}"
        )
    train = _open(loaded[settings.dataset_train_split], where, settings)
    if settings.dataset_test_split in loaded:
        return train, _open(loaded[settings.dataset_test_split], where, settings)
    if "dataset_test_split" in settings.model_fields_set:
        raise ConfigurationError(
            f"{where} has no split {settings.dataset_test_split!r}; set DATASET_TEST_SPLIT to one of {sorted(loaded)}"
        )
    return train, None


def _open(dataset: Any, where: str, settings: DataSettings) -> Opened:
    """The columns of a dataset that matter; ConfigurationError where one is missing or holds something else."""
    table = dataset.data.table
    question = _column(table, where, "PROMPT_COLUMN", settings.prompt_column, _PROMPT_COLUMNS)
    answer = _column(table, where, "GROUND_TRUTH_COLUMN", settings.ground_truth_column, _GROUND_TRUTH_COLUMNS)
    if not _is_text(table[question].type):
        raise ConfigurationError(
            f"{where}: column {question!r} holds {table[question].type}; set PROMPT_COLUMN to a text column"
        )
    kind = table[answer].type
    if not (_is_text(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ConfigurationError(
            f"{where}: column {answer!r} holds {kind}; set GROUND_TRUTH_COLUMN to a column of text or numbers"
        )
    columns = {"question": question, "answer": answer}
    if settings.category_column is not None:
        columns["category"] = _column(table, where, "CATEGORY_COLUMN", settings.category_column, ())
    files = tuple(file["filename"] for file in dataset.cache_files)
    return Opened(files, None if files else table, columns)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _column(table: pa.Table, where: str, setting: str, given: str | None, usual: tuple[str, ...]) -> str:
    if given is not None:
        if given not in table.column_names:
            raise ConfigurationError(f"{setting} is {given!r}, which {where} lacks; it has {table.column_names}")
        return given
    found = next((name for name in usual if name in table.column_names), None)
    if found is None:
        raise ConfigurationError(
            f"{where} has none of the columns {', '.join(usual)}; set {setting} to one of {table.column_names}"
        )
    return found


def _rows(opened: Opened, form: GroundTruthFormat, refused: Counter[str]) -> Rows:
    table = opened.table()
    truths = _ground_truths(pc.cast(table["answer"], pa.string()), form)
    questions = _flags(pc.fill_null(pc.match_substring_regex(table["question"], r"\S"), False))
    answered = _flags(pc.fill_null(pc.not_equal(truths, ""), False))
    content = _content(table["question"], truths)
    del table
    without_question, without_truth = int((~questions).sum()), int((questions & ~answered).sum())
    if without_question:
        refused["no question"] += without_question
    if without_truth:
        refused["no ground truth"] += without_truth
    numbers = np.flatnonzero(questions & answered).astype(np.int32)
    rows = Rows(opened.table(), truths, numbers, content)
    pa.default_memory_pool().release_unused()
    return rows


def _content(*columns: pa.ChunkedArray) -> str:
    """Return a digest of the texts of columns, however these are cut into chunks."""
    digest = hashlib.blake2b(digest_size=16)
    for column in columns:
        for start in range(0, len(column), _DIGESTED_ROWS):
            texts = column.slice(start, _DIGESTED_ROWS).to_pylist()
            digest.update("".join(f"{len(text or '')} {text or ''}\n" for text in texts).encode())
    return digest.hexdigest()


def _flags(values: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.bool_]]:
    flags: np.ndarray[Any, np.dtype[np.bool_]] = values.to_numpy()
    return flags.astype(np.bool_)


def _format(opened: Opened, settings: DataSettings) -> GroundTruthFormat:
    """The format asked for; ``auto`` is the one that most of the first thousand rows have."""
    if settings.ground_truth_format is not GroundTruthFormat.AUTO:
        return settings.ground_truth_format
    first = pc.cast(opened.table()["answer"].slice(0, 1000), pa.string())
    for form, mark in ((GroundTruthFormat.HASH, "####"), (GroundTruthFormat.BOXED, "\\boxed{")):
        if 2 * (pc.sum(pc.match_substring(first, mark)).as_py() or 0) > len(first):
            return form
    return GroundTruthFormat.PLAIN


def _ground_truths(answers: pa.ChunkedArray, form: GroundTruthFormat) -> pa.ChunkedArray:
    """One trimmed ground truth a row, null or empty where there is none; numbers without thousands separators."""
    if form is GroundTruthFormat.HASH:
        found = pc.struct_field(pc.extract_regex(answers, _AFTER_HASHES), "truth")
    elif form is GroundTruthFormat.BOXED:
        found = pa.chunked_array([pa.array([last_boxed(text or "") for text in answers.to_pylist()], pa.string())])
    else:
        found = answers
    trimmed = pc.utf8_trim_whitespace(found)
    grouped = pc.match_substring_regex(trimmed, _GROUPED_NUMBER)
    return pc.if_else(grouped, pc.replace_substring(trimmed, ",", ""), trimmed)


_BOX_TOKENS = re.compile(r"\\boxed\s*\{|\\[{}\\]|[{}]")


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{}`` whose braces balance, or None."""
    open_braces: list[int | None] = []
    last: str | None = None
    for token in _BOX_TOKENS.finditer(text):
        kind = token.group()
        if kind.startswith("\\boxed"):
            open_braces.append(token.end())
        elif kind == "{":
            open_braces.append(None)
        elif kind == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                last = text[start : token.start()]
    return last


def _hold_out(rows: Rows, settings: DataSettings) -> tuple[Rows, Rows]:
    """Training and held-out rows of a source that has no held-out split: a share drawn by DATA_SEED."""
    if len(rows) < 2:
        return rows, rows.select(np.empty(0, np.int64))
    order = np.random.default_rng([settings.data_seed, len(rows)]).permutation(len(rows))
    cut = min(len(rows) - 1, max(1, round(settings.dataset_held_out * len(rows))))
    return rows.select(np.sort(order[cut:])), rows.select(np.sort(order[:cut]))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
