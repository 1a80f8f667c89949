"""The rows of a dataset, from a generator, a local file or the Hugging Face hub.

Rows stay in memory-mapped Arrow tables, so that a million of them cost little memory. Only the ground truths and the
numbers of the rows that qualify are held in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from services.chat.messages import content_text
from services.core.errors import ConfigurationError
from services.core.settings import Method
from services.data_server import generators
from services.data_server.settings import (
    GROUPS,
    DataSettings,
    GroundTruthFormat,
    check_file,
    generator_of,
    named_files,
)
from services.data_server.tables import (
    MEDIA,
    ROW,
    ReadTable,
    check_columns,
    load_from_hub,
    on_disk,
    read_json_lines,
    read_parquet,
)
from services.http.problems import ProblemError
from services.protocol.ground_truths import REASONING_GYM, last_boxed
from services.protocol.groups import GroupFormatError, read_group_file
from services.protocol.prompts import Demonstration

INSTRUCTIONS = {
    GroundTruthFormat.HASH: 'Think step by step, then give the final answer on the last line after "####".',
    GroundTruthFormat.BOXED: "Think step by step, then give the final answer within \\boxed{}.",
}
"""The instruction asks for the form of the dataset's ground truths; every verifier reads it."""

_AFTER_HASHES = r"(?s)^.*####[ \t]*(?P<truth>[^\n]*)"
_ROWS_AT_ONCE = 10_000
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class Row:
    """A row that qualifies: its number in the dataset, the question, its answer in full, and the ground truth.

    Where no reward reads a ground truth, answer and ground truth may be empty.
    """

    number: int
    question: str
    answer: str
    ground_truth: str
    category: str | None


@dataclass(frozen=True)
class Rows:
    """The rows of one split that have a question and what rewards need, in the order of the dataset."""

    table: pa.Table
    """All rows of the split, with the columns question, answer and perhaps ground_truth and category."""
    texts: pa.ChunkedArray | None
    """The JSON of each row of ``table``; None where rows have no columns that somebody may read."""
    truths: pa.Array
    """The ground truth of each row of ``table``."""
    numbers: np.ndarray[Any, np.dtype[np.int32]]
    """The rows of ``table`` that these rows are."""
    content: str
    """Digest of the questions and ground truths of ``table``."""
    has_demonstrations: bool = False
    """True if each row is learned as it is; its JSON is the question."""

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
                _text(row.get("answer")) or "",
                self.truths[number].as_py() or "",
                _text(row.get("category")),
            )
            for number, row in zip(numbers, rows, strict=True)
        ]

    def text(self, place: int) -> str | None:
        """Return the JSON of the row at ``place``; None where rows have none."""
        return None if self.texts is None else self.texts[int(self.numbers[place])].as_py()

    def select(self, places: np.ndarray[Any, Any] | slice) -> Rows:
        """Return only the rows at ``places``."""
        return replace(self, numbers=self.numbers[places])

    def digest(self) -> str:
        """Return a digest of the dataset's questions and ground truths in their order, and of the choice of rows."""
        return hashlib.blake2b(self.content.encode() + self.numbers.tobytes(), digest_size=8).hexdigest()

    def texts_digest(self) -> str | None:
        """Return a digest of the rows' JSON, however it is cut into chunks; None where rows have none."""
        if self.texts is None:
            return None
        digest = hashlib.blake2b(pc.fill_null(pc.binary_length(self.texts), -1).to_numpy().tobytes(), digest_size=8)
        for chunk in self.texts.chunks:
            _, ends, data = chunk.buffers()
            first, last = np.frombuffer(ends, np.int32)[[chunk.offset, chunk.offset + len(chunk)]]
            digest.update(memoryview(data)[first:last])
        return digest.hexdigest()


@dataclass(frozen=True)
class DatasetRows:
    """The rows of a dataset: training and held-out ones, and the number of refused rows by reason."""

    name: str
    instruction: str | None
    """Asks for the form in which the verifier reads answers; appended to every question."""
    train: Rows
    test: Rows
    refused: dict[str, int]
    first_refused: dict[str, int]
    """The number, from 0 on, of the first row that was refused for a reason."""
    columns: Sequence[str]
    """The columns of whole rows; none where these do not travel."""
    shadowed: Sequence[str]
    """Columns that rewards reach only through `row`."""

    @property
    def rows(self) -> int:
        """The number of rows of both splits, the refused ones included."""
        return len(self.train) + len(self.test) + sum(self.refused.values())


TOO_LONG = "too long"
"""The reason of rows with too many tokens."""


@dataclass(frozen=True)
class Refusal:
    """The reason why a row that has what it needs makes no prompt, and a sentence with its number and a remedy."""

    reason: str
    sentence: str


class Refused(Counter[str]):
    """The number of rows that were left out, by reason, and the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, int] = {}

    def add(self, reason: str, rows: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Count the rows that are True, [rows of a split]."""
        self[reason] += int(rows.sum())
        if rows.any():
            self.first.setdefault(reason, int(rows.argmax()))


def load(
    settings: DataSettings, first: int | None = None, *, eval_only: bool = False, seen: Sequence[str] = ()
) -> DatasetRows:
    """Load the dataset that DATASET names; only the ``first`` rows of each split of a dataset on the hub, if given.

    If it is ``eval_only`` and has no held-out split, all of its rows are held out. Rows whose columns ``seen`` or
    AGENT_COLUMNS differ ask different questions.

    Raises:
        ConfigurationError: the dataset cannot be loaded, lacks a column, or has no row that qualifies.
    """
    refused: Refused = Refused()
    name, train, test = _tables(settings, first, refused)
    if settings.method is Method.SFT and not train.has_demonstrations and not eval_only:
        raise ConfigurationError(
            f"METHOD is sft, but DATASET {settings.dataset!r} has neither a column `messages` nor the columns `prompt` "
            "and `completion`; rename its columns, or set METHOD=rl"
        )
    form = _format(train, settings)
    is_gym = generator_of(settings.dataset) == REASONING_GYM
    instruction = generators.REASONING_INSTRUCTION if is_gym else INSTRUCTIONS.get(form)
    questions_of = partial(_questions, settings, instruction, (*settings.visible_columns, *seen))
    train_rows = _rows(train, form, refused, settings)
    if test is None and eval_only:
        train_rows, test_rows = train_rows.select(slice(0)), train_rows
    elif test is None and settings.method is Method.SFT and "dataset_held_out" not in settings.model_fields_set:
        test_rows = train_rows.select(slice(0))
    elif test is None:
        train_rows, test_rows = _hold_out(train_rows, questions_of(train), settings)
    else:
        test_rows = _rows(test, form, refused, settings)
        held_out = questions_of(test)[test_rows.numbers]
        train_rows = _not_held_out(train_rows, questions_of(train), held_out, refused)
    for rows, split in ((train_rows, "training"), (test_rows, "held-out")):
        if len(rows) == 0 and not (eval_only if rows is train_rows else rows.has_demonstrations):
            left_out = ", ".join(f"{count} with {reason}" for reason, count in (+refused).items()) or "it has no rows"
            what = "a question and a ground truth" if settings.needs_truth else "a question"
            raise ConfigurationError(
                f"DATASET {settings.dataset!r} has no {split} row with {what} ({left_out}); check the columns and "
                "GROUND_TRUTH_FORMAT"
            )
    return DatasetRows(
        name, instruction, train_rows, test_rows, dict(+refused), refused.first, train.columns, train.shadowed
    )


def _tables(settings: DataSettings, first: int | None, refused: Refused) -> tuple[str, ReadTable, ReadTable | None]:
    """Return a dataset's name and its tables: the training rows, and the held-out ones if it has a split of them."""
    generator, files = generator_of(settings.dataset), named_files(settings)
    if generator is not None:
        check_columns((), f"DATASET {settings.dataset!r}", settings)
        train, test = generators.TABLES[generator](settings, refused)
        return generator.removesuffix(":"), ReadTable(lambda: train), None if test is None else ReadTable(lambda: test)
    if files:
        tables = [_load_file(variable, path, settings) for variable, path in files.items()]
        return Path(settings.dataset).stem, tables[0], tables[1] if len(tables) > 1 else None
    return settings.dataset.rpartition("/")[2], *load_from_hub(settings, first)


def instruction_of(settings: DataSettings, default: str | None) -> str | None:
    """Return what is appended to each question: INSTRUCTION, else the dataset's ``default``."""
    instruction = default if settings.instruction is None else settings.instruction
    return None if instruction is None or instruction.lower() == "none" else instruction


def _load_file(variable: str, path: Path, settings: DataSettings) -> ReadTable:
    check_file(variable, path)
    read = {".jsonl": read_json_lines, GROUPS: _read_groups}.get(path.suffix, read_parquet)
    return read(path, f"{variable} {str(path)!r}", settings)


def _read_groups(path: Path, where: str, settings: DataSettings) -> ReadTable:
    """Return a function that maps a file's groups as rows; the arguments are those of ``read_json_lines``.

    Raises:
        ConfigurationError: METHOD is not sft, or `grpo groups` has not written the file.
    """
    if settings.method is not Method.SFT:
        raise ConfigurationError(f"{where} has recorded answers to learn as they are; set METHOD=sft, or give rows")
    schema = pa.schema([(ROW, pa.string())])
    try:
        head, groups = read_group_file(path)

        def batches() -> Iterator[pa.RecordBatch]:
            for group in groups:
                row = {
                    "tokenizer": head.tokenizer,
                    "prompt": group.prompt.prompt,
                    "prompt_ids": group.prompt_ids,
                    "messages": [message.model_dump() for message in group.prompt.messages],
                    "demonstrations": [
                        Demonstration(
                            completion=sequence.completion,
                            completion_ids=sequence.completion_ids.tolist(),
                            loss_mask=sequence.mask.tolist(),
                            episode=place if sequence.episode is None else sequence.episode,
                        ).model_dump()
                        for place, sequence in enumerate(group.sequences)
                    ],
                }
                yield pa.record_batch([pa.array([orjson.dumps(row).decode()], pa.string())], schema)

        return ReadTable(on_disk(batches(), schema, where), has_demonstrations=True)
    except GroupFormatError as error:
        raise ConfigurationError(f"{where}: {error}; write the file with `grpo groups RUN --out FILE`") from error


def _rows(read_table: ReadTable, form: GroundTruthFormat, refused: Refused, settings: DataSettings) -> Rows:
    table = read_table()
    truths, texts = _truths(table, form), pc.cast(table["question"], pa.string())
    largest = pc.max_element_wise(pc.binary_length(texts), pc.binary_length(truths)).to_numpy()
    too_large, not_json = largest > settings.largest_row, np.zeros(len(table), bool)
    if has_rows := ROW in table.column_names:
        too_large |= table[ROW].is_null().to_numpy()
        not_json = pc.fill_null(pc.equal(pc.binary_length(table[ROW]), 0), False).to_numpy()
    reasons = {
        "no question": ~pc.fill_null(pc.match_substring_regex(texts, r"\S"), False).to_numpy(),
        "no ground truth": ~pc.fill_null(pc.not_equal(truths, ""), False).to_numpy(),
        f"more than {settings.largest_row // 2**10} KiB": too_large,
        "NaN or infinity": not_json,
    }
    if MEDIA in table.column_names:
        reasons["images, sounds or videos, of which nothing is read"] = table[MEDIA].to_numpy()
    if not settings.needs_truth:
        del reasons["no ground truth"]
    if read_table.has_demonstrations:  # A row that is too large has no question.
        del reasons["no question"]
    content = _digest(texts, truths)
    del table, texts
    left = np.ones(len(largest), bool)
    for reason, rows in reasons.items():
        refused.add(reason, left & rows)
        left &= ~rows
    numbers = np.flatnonzero(left).astype(np.int32)
    table = read_table()
    row_texts = table[ROW] if has_rows else None
    columns = [name for name in table.column_names if name not in (ROW, MEDIA)]
    rows = Rows(
        table.select(columns), row_texts, truths.combine_chunks(), numbers, content, read_table.has_demonstrations
    )
    pa.default_memory_pool().release_unused()
    return rows


def _truths(table: pa.Table, form: GroundTruthFormat) -> pa.ChunkedArray:
    """Return the trimmed ground truth of each row, null or empty for a row without one."""
    if "ground_truth" in table.column_names:
        return table["ground_truth"]
    if "answer" not in table.column_names:
        return pa.chunked_array([pa.nulls(len(table), pa.string())])
    truths = pc.cast(table["answer"], pa.string())
    if form is GroundTruthFormat.HASH:
        truths = pc.struct_field(pc.extract_regex(truths, _AFTER_HASHES), "truth")
    elif form is GroundTruthFormat.BOXED:
        truths = pa.chunked_array([pa.array([last_boxed(text or "") for text in truths.to_pylist()], pa.string())])
    return pc.utf8_trim_whitespace(truths)


def _digest(*columns: pa.ChunkedArray) -> str:
    """Return a digest of the texts of columns, however these are cut into chunks."""
    digest = hashlib.blake2b(digest_size=16)
    for column in columns:
        for text in _each(column):
            digest.update(f"{len(text)} {text}\n".encode())
    return digest.hexdigest()


def _each(column: pa.ChunkedArray) -> Iterator[str]:
    """Yield the texts of a column, "" for null."""
    for start in range(0, len(column), _ROWS_AT_ONCE):
        yield from (text or "" for text in column.slice(start, _ROWS_AT_ONCE).to_pylist())


def _questions(settings: DataSettings, instruction: str | None, seen: Sequence[str], read_table: ReadTable) -> Hashes:
    """Return a hash of DATA_SEED and each question [rows], in which white space and the instruction do not count."""
    table = read_table()
    rows = _each(table[ROW]) if seen and ROW in table.column_names else repeat("")
    end = " " + " ".join((instruction_of(settings, instruction) or "").split())

    def hashed(text: str, row: str) -> int:
        question = _asked(text, settings.prompt_column or "prompt") if read_table.has_demonstrations and text else text
        columns = json.loads(row) if row else {}
        others = [columns.get(name) for name in seen] or ""
        content = f"{settings.data_seed} {' '.join(question.split()).removesuffix(end)}{others}"
        return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big")

    texts = _each(pc.cast(table["question"], pa.string()))
    return np.fromiter(map(hashed, texts, rows), np.uint64, len(table))


def _asked(text: str, prompt: str) -> str:
    """Return the question of a row to learn as it is: what precedes its first answer, without the system's turn."""
    row = orjson.loads(text)
    is_whole = "messages" in row and "demonstrations" not in row
    asked = row["messages"] if is_whole else row.get(prompt, row.get("prompt"))
    if not isinstance(asked, list):
        return str(asked)
    try:
        before = takewhile(lambda m: not is_whole or m is asked[0] or m["role"] != "assistant", asked)
        return "\n".join(content_text(m["content"]) for m in before if m["role"] not in ("system", "developer"))
    except (KeyError, TypeError, ProblemError):  # It is refused where it is rendered.
        return text


def _format(read_table: ReadTable, settings: DataSettings) -> GroundTruthFormat:
    """Return GROUND_TRUTH_FORMAT; for ``auto``, the format of most of the first thousand rows."""
    if settings.ground_truth_format is not GroundTruthFormat.AUTO:
        return settings.ground_truth_format
    table = read_table()
    if "answer" not in table.column_names:
        return GroundTruthFormat.PLAIN
    first = pc.cast(table["answer"].slice(0, 1000), pa.string())
    for form, mark in ((GroundTruthFormat.HASH, "####"), (GroundTruthFormat.BOXED, "\\boxed{")):
        if 2 * (pc.sum(pc.match_substring(first, mark)).as_py() or 0) > len(first):
            return form
    return GroundTruthFormat.PLAIN


def _hold_out(rows: Rows, questions: Hashes, settings: DataSettings) -> tuple[Rows, Rows]:
    """Return training and held-out rows of a dataset without a held-out split.

    The share that DATA_SEED draws is of the questions, each of which is on one side with all of its rows.

    Raises:
        ConfigurationError: the dataset has a single question.
    """
    questions = questions[rows.numbers]
    in_random_order = np.unique(questions)
    if len(in_random_order) == 1:
        raise ConfigurationError(
            f"DATASET {settings.dataset!r} has a single question, and one is held out; give more, or a DATASET_TEST"
        )
    cut = min(len(in_random_order) - 1, max(1, round(settings.dataset_held_out * len(in_random_order))))
    is_held_out = np.isin(questions, in_random_order[:cut])
    return rows.select(~is_held_out), rows.select(is_held_out)


def _not_held_out(train: Rows, questions: Hashes, held_out: Hashes, refused: Refused) -> Rows:
    """Return the training rows whose question is not held out; count the others."""
    left_out = np.isin(questions, held_out) & np.isin(np.arange(len(questions)), train.numbers)
    refused.add("also held out", left_out)
    return train.select(~left_out[train.numbers])


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
