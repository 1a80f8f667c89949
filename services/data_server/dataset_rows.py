"""The rows of a dataset, from a generator, a local file or the Hugging Face hub.

Rows stay in memory-mapped Arrow tables, so that a million of them cost little memory. Only the ground truths and the
numbers of the rows that qualify are held in memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from services.core.errors import ConfigurationError
from services.data_server import generators
from services.data_server.settings import DataSettings, GroundTruthFormat, check_file, generator_of, named_files
from services.data_server.tables import ReadTable, load_from_hub, read_json_lines, read_parquet
from services.protocol.ground_truths import REASONING_GYM, last_boxed

INSTRUCTIONS = {
    GroundTruthFormat.HASH: 'Think step by step, then give the final answer on the last line after "####".',
    GroundTruthFormat.BOXED: "Think step by step, then give the final answer within \\boxed{}.",
}
"""The instruction asks for the form of the dataset's ground truths; every verifier reads it."""

_AFTER_HASHES = r"(?s)^.*####[ \t]*(?P<truth>[^\n]*)"
_DIGESTED_ROWS = 10_000
_LARGEST_TEXT = 256 * 2**10
"""Bytes of a question or ground truth. A larger one would take minutes to tokenise, and fit into no prompt."""
_GROUPED_NUMBER = r"^[-+]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?$"


@dataclass(frozen=True)
class Row:
    """A row that qualifies: its number in the dataset, the question, its answer in full, and the ground truth."""

    number: int
    question: str
    answer: str
    ground_truth: str
    category: str | None


@dataclass(frozen=True)
class Rows:
    """The rows of one split that have a question and a ground truth, in the order of the dataset."""

    table: pa.Table
    """All rows of the split, with the columns question, answer and perhaps ground_truth and category."""
    truths: pa.Array
    """The ground truth of each row of ``table``."""
    numbers: np.ndarray[Any, np.dtype[np.int32]]
    """The rows of ``table`` that these rows are."""
    content: str
    """Digest of the questions and ground truths of ``table``."""

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, places: list[int]) -> list[Row]:
        """Return the rows at ``places`` (0 to len - 1), in that order."""
        numbers = self.numbers[places].tolist()
        # Slices find their chunk and copy nothing, whereas Table.take joins all chunks of a column first.
        rows = pa.concat_tables([self.table.slice(number, 1) for number in numbers]).to_pylist()
        return [
            Row(
                number,
                str(row["question"]),
                str(row["answer"]),
                self.truths[number].as_py(),
                _text(row.get("category")),
            )
            for number, row in zip(numbers, rows, strict=True)
        ]

    def select(self, places: np.ndarray[Any, Any] | slice) -> Rows:
        """Return only the rows at ``places``."""
        return replace(self, numbers=self.numbers[places])

    def digest(self) -> str:
        """Return a digest of the dataset's questions and ground truths in their order, and of the choice of rows."""
        return hashlib.blake2b(self.content.encode() + self.numbers.tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class DatasetRows:
    """The rows of a dataset: training and held-out ones, and the number of refused rows by reason."""

    name: str
    instruction: str | None
    """Asks for the form in which the verifier reads answers; appended to every question."""
    train: Rows
    test: Rows
    refused: dict[str, int]

    @property
    def rows(self) -> int:
        """The number of rows of both splits, the refused ones included."""
        return len(self.train) + len(self.test) + sum(self.refused.values())


def load(settings: DataSettings, first: int | None = None, *, eval_only: bool = False) -> DatasetRows:
    """Load the dataset that DATASET names; only the ``first`` rows of each split of a dataset on the hub, if given.

    If it is ``eval_only`` and has no held-out split, all of its rows are held out.

    Raises:
        ConfigurationError: the dataset cannot be loaded, lacks a column, or has no row that qualifies.
    """
    refused: Counter[str] = Counter()
    generator, files = generator_of(settings.dataset), named_files(settings)
    train: ReadTable
    test: ReadTable | None
    if generator is not None:
        train, test = (_in_memory(table) for table in generators.TABLES[generator](settings, refused))
        name = generator.removesuffix(":")
    elif files:
        splits = [_load_file(variable, path, settings) for variable, path in files.items()]
        train, test = splits[0], splits[1] if len(splits) > 1 else None
        name = Path(settings.dataset).stem
    else:
        train, test = load_from_hub(settings, first)
        name = settings.dataset.rpartition("/")[2]
    form = _format(train, settings)
    instruction = generators.REASONING_INSTRUCTION if generator == REASONING_GYM else INSTRUCTIONS.get(form)
    train_rows = _rows(train, form, refused)
    if test is None and eval_only:
        train_rows, test_rows = train_rows.select(slice(0)), train_rows
    elif test is None:
        train_rows, test_rows = _hold_out(train_rows, settings)
    else:
        test_rows = _rows(test, form, refused)
    for rows, split in ((train_rows, "training"), (test_rows, "held-out")):
        if len(rows) == 0 and not (eval_only and rows is train_rows):
            left_out = ", ".join(f"{count} with {reason}" for reason, count in (+refused).items()) or "it has no rows"
            raise ConfigurationError(
                f"DATASET {settings.dataset!r} has no {split} row with a question and a ground truth ({left_out}); "
                "check the columns and GROUND_TRUTH_FORMAT"
            )
    return DatasetRows(name, instruction, train_rows, test_rows, dict(+refused))


def _load_file(variable: str, path: Path, settings: DataSettings) -> ReadTable:
    check_file(variable, path)
    read = read_json_lines if path.suffix == ".jsonl" else read_parquet
    return read(path, f"{variable} {str(path)!r}", settings)


def _in_memory(table: pa.Table) -> ReadTable:
    return lambda: table


def _rows(read_table: ReadTable, form: GroundTruthFormat, refused: Counter[str]) -> Rows:
    table = read_table()
    has_truths = "ground_truth" in table.column_names
    truths = table["ground_truth"] if has_truths else _ground_truths(pc.cast(table["answer"], pa.string()), form)
    texts = pc.cast(table["question"], pa.string())
    questions = pc.fill_null(pc.match_substring_regex(texts, r"\S"), False).to_numpy()
    answered = pc.fill_null(pc.not_equal(truths, ""), False).to_numpy()
    largest = pc.max_element_wise(pc.binary_length(texts), pc.binary_length(truths)).to_numpy()
    content = _digest(texts, truths)
    del table, texts
    refused["no question"] += int((~questions).sum())
    refused["no ground truth"] += int((questions & ~answered).sum())
    refused[f"more than {_LARGEST_TEXT // 2**10} KiB"] += int((questions & answered & (largest > _LARGEST_TEXT)).sum())
    numbers = np.flatnonzero(questions & answered & ~(largest > _LARGEST_TEXT)).astype(np.int32)
    rows = Rows(read_table(), truths.combine_chunks(), numbers, content)
    pa.default_memory_pool().release_unused()
    return rows


def _digest(*columns: pa.ChunkedArray) -> str:
    """Return a digest of the texts of columns, however these are cut into chunks."""
    digest = hashlib.blake2b(digest_size=16)
    for column in columns:
        for start in range(0, len(column), _DIGESTED_ROWS):
            texts = column.slice(start, _DIGESTED_ROWS).to_pylist()
            digest.update("".join(f"{len(text or '')} {text or ''}\n" for text in texts).encode())
    return digest.hexdigest()


def _format(read_table: ReadTable, settings: DataSettings) -> GroundTruthFormat:
    """Return GROUND_TRUTH_FORMAT; for ``auto``, the format of most of the first thousand rows."""
    if settings.ground_truth_format is not GroundTruthFormat.AUTO:
        return settings.ground_truth_format
    first = pc.cast(read_table()["answer"].slice(0, 1000), pa.string())
    for form, mark in ((GroundTruthFormat.HASH, "####"), (GroundTruthFormat.BOXED, "\\boxed{")):
        if 2 * (pc.sum(pc.match_substring(first, mark)).as_py() or 0) > len(first):
            return form
    return GroundTruthFormat.PLAIN


def _ground_truths(answers: pa.ChunkedArray, form: GroundTruthFormat) -> pa.ChunkedArray:
    """Return a trimmed ground truth a row, null or empty if the row has none; numbers lose thousands separators."""
    if form is GroundTruthFormat.HASH:
        truths = pc.struct_field(pc.extract_regex(answers, _AFTER_HASHES), "truth")
    elif form is GroundTruthFormat.BOXED:
        truths = pa.chunked_array([pa.array([last_boxed(text or "") for text in answers.to_pylist()], pa.string())])
    else:
        truths = answers
    trimmed = pc.utf8_trim_whitespace(truths)
    grouped = pc.match_substring_regex(trimmed, _GROUPED_NUMBER)
    return pc.if_else(grouped, pc.replace_substring(trimmed, ",", ""), trimmed)


def _hold_out(rows: Rows, settings: DataSettings) -> tuple[Rows, Rows]:
    """Return training and held-out rows of a dataset without a held-out split: DATA_SEED draws the held-out share.

    Raises:
        ConfigurationError: the dataset has a single row.
    """
    if len(rows) == 1:
        raise ConfigurationError(
            f"DATASET {settings.dataset!r} has a single row with a question and a ground truth, and at least one is "
            "held out of training; give more rows, or a file of held-out ones as DATASET_TEST"
        )
    order = np.random.default_rng([settings.data_seed, len(rows)]).permutation(len(rows))
    cut = min(len(rows) - 1, max(1, round(settings.dataset_held_out * len(rows))))
    return rows.select(np.sort(order[cut:])), rows.select(np.sort(order[:cut]))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
