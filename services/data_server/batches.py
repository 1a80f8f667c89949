"""Batches of prompts from a cursor on.

``EpochOrder`` permutes the prompts of each epoch, ``walk`` moves a cursor along that order, and ``Batches`` gives the
prompts out. ``ServerState`` keeps the cursors of the consumers and the success rates of prompts in SQLite, so that they
survive a restart.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import Counter, Gauge

from services.core import files
from services.core.errors import ConfigurationError
from services.core.sources import MAIN, Source
from services.data_server.dataset import Dataset, load
from services.data_server.dataset_rows import TOO_LONG
from services.data_server.settings import Curriculum, DataSettings
from services.http.database import Statement
from services.http.problems import ProblemError
from services.protocol.prompts import Cursor, DataStats, Split

Places = np.ndarray[Any, np.dtype[np.int32]]
Rates = np.ndarray[Any, np.dtype[np.float32]]

_LEAST_WEIGHT = 0.05
"""Chance of the prompt that the curriculum wants last, relative to the prompt that it wants first."""
_KEPT_EPOCHS = 4
_LAST_EPOCH = 2**31 - 1
"""The largest epoch that a cursor on the wire takes."""


@dataclass
class EpochOrder:
    """A permutation of a split's prompts for each epoch: the same for the same seed, epoch and success rates."""

    size: int
    seed: int
    curriculum: Curriculum
    rates_at_start: Callable[[int], Rates | None] = lambda epoch: None
    """Returns the success rates (NaN: unknown, shape [size]) at the beginning of an epoch, None if all are unknown. It
    is called only with a curriculum that uses them, and must return the same each time."""

    def __post_init__(self) -> None:
        self.of = lru_cache(_KEPT_EPOCHS)(self._make)
        """Place in the dataset of the prompt at each position of an epoch, by the epoch: shape [size]."""

    def __len__(self) -> int:
        return self.size

    def _make(self, epoch: int) -> Places:
        if self.curriculum is Curriculum.SOURCE:
            return np.arange(self.size, dtype=np.int32)
        random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        if self.curriculum is Curriculum.OFF:
            return random.permutation(self.size).astype(np.int32)
        rates = self.rates_at_start(epoch)
        # A prompt that was never tried counts as half solved.
        solved = np.full(self.size, 0.5) if rates is None else np.where(np.isnan(rates), 0.5, rates).astype(np.float64)
        weights = _LEAST_WEIGHT + (1 - _LEAST_WEIGHT) * 4 * solved * (1 - solved)
        # Exponential keys give a weighted order without replacement (Efraimidis and Spirakis 2006, algorithm A-ES).
        keys = random.exponential(size=self.size) / weights
        return np.argsort(keys, kind="stable").astype(np.int32)


def walk(
    order: EpochOrder,
    cursor: Cursor,
    count: int,
    qualifies: Callable[[int], bool],
    *,
    ends_with_epoch: bool = False,
) -> tuple[list[tuple[int, int, int]], Cursor]:
    """Return (place, epoch, position) of the next ``count`` prompts from ``cursor`` on, and the cursor after them.

    The walk passes over the positions in ``cursor.skip`` and over places that do not qualify. It continues in the next
    epoch unless it ``ends_with_epoch``, and gives up after a whole epoch without a prompt.

    Raises:
        ProblemError: 422, the walk would continue in an epoch that no cursor can name.
    """
    prompts: list[tuple[int, int, int]] = []
    epoch, position, skip = cursor.epoch, cursor.position, set(cursor.skip)
    passed_over = 0
    while len(prompts) < count and passed_over < len(order):
        if position >= len(order):
            epoch, position, skip = _next_epoch(epoch), 0, set()
            if ends_with_epoch and (prompts or cursor.position < len(order)):
                break
        place = int(order.of(epoch)[position])
        if position not in skip and qualifies(place):
            prompts.append((place, epoch, position))
            passed_over = 0
        else:
            passed_over += 1
        position += 1
    if position >= len(order):
        epoch, position, skip = _next_epoch(epoch), 0, set()
    return prompts, Cursor(epoch=epoch, position=position, skip=sorted(s for s in skip if s >= position))


def _next_epoch(epoch: int) -> int:
    if epoch >= _LAST_EPOCH:
        raise ProblemError(422, f"the batch goes beyond epoch {_LAST_EPOCH}, the last one; begin at an earlier cursor")
    return epoch + 1


SERVED = Counter("data_prompts_served", "Prompts given out.", ["split", "source"])
EPOCH = Gauge("data_epoch", "The epoch of the last prompt given out.", ["split", "source"])
REFUSED_ROWS = Gauge("data_rows_refused", "Rows of the dataset that were left out.", ["reason", "source"])
TOO_LONG_PROMPTS = Gauge(
    "data_prompts_too_long", "Prompts met that have more than MAX_PROMPT_TOKENS tokens.", ["source"]
)

_RENDERED_AHEAD = 2048
"""Prompts rendered before the first request, because the first requests of a run come all at once."""


@dataclass(frozen=True)
class Batches:
    """The prompts of a source in the order of their epochs."""

    source: Source
    dataset: Dataset
    orders: dict[Split, EpochOrder]
    state: ServerState

    @classmethod
    def load(cls, settings: DataSettings, source: Source = MAIN, *, own_process: bool = False) -> Batches:
        """Load dataset and state of a source. With ``own_process`` the state is in the run directory, else in memory.

        Raises:
            ConfigurationError: the dataset, the tokenizer or the state cannot be loaded.
        """
        dataset = load(settings, source, own_process=own_process)
        train, test = dataset.catalogues[Split.TRAIN], dataset.catalogues[Split.TEST]
        seed, curriculum = settings.data_seed, settings.curriculum
        # A run that is resumed with another dataset or order has another state for it.
        identity = f"{settings.dataset} ({len(train)} prompts, DATA_SEED {seed}, {curriculum.value})"
        if source.name:
            identity = f"{source.name}: {identity}"
        digest = hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
        state = ServerState(settings.run_dir / "data" / digest if own_process else None)
        orders = {
            Split.TRAIN: EpochOrder(
                len(train),
                seed=seed,
                curriculum=curriculum,
                rates_at_start=lambda epoch: state.rates_at_start(epoch, len(train)),
            ),
            Split.TEST: EpochOrder(len(test), seed=0, curriculum=Curriculum.SOURCE),
        }
        train.prefetch(orders[Split.TRAIN].of(0)[:_RENDERED_AHEAD].tolist())
        for reason, count in dataset.left_out.items():
            REFUSED_ROWS.labels(reason, source.name).set(count)
        return cls(source, dataset, orders, state)

    def batch(self, split: Split, cursor: Cursor, batch_size: int) -> tuple[list[dict[str, Any]], Cursor]:
        """Return the prompts from ``cursor`` on and the cursor after them.

        Raises:
            ProblemError: 422, the cursor is beyond the split, or a whole epoch has no prompt that qualifies.
        """
        catalogue, order = self.dataset.catalogues[split], self.orders[split]
        self.check(split, cursor)
        catalogue.prefetch(order.of(cursor.epoch)[cursor.position : cursor.position + batch_size].tolist())
        places, after = walk(
            order,
            cursor,
            batch_size,
            lambda place: catalogue.record(place) is not None,
            # Held-out prompts are for evaluation, each once: a batch never continues in a second round.
            ends_with_epoch=split is Split.TEST,
        )
        if not places and split is Split.TRAIN:
            raise ProblemError(422, f"no {split.value} prompt is left: all are skipped or exceed MAX_PROMPT_TOKENS")
        prompts = [
            {**record, "epoch": epoch, "position": position, **catalogue.row(place)}
            for place, epoch, position in places
            if (record := catalogue.record(place)) is not None
        ]
        SERVED.labels(split.value, self.source.name).inc(len(prompts))
        EPOCH.labels(split.value, self.source.name).set(after.epoch)
        TOO_LONG_PROMPTS.labels(self.source.name).set(self.dataset.left_out[TOO_LONG])
        return prompts, after

    def check(self, split: Split, cursor: Cursor) -> None:
        """Raise ProblemError 422 if a cursor is beyond its split."""
        size = len(self.orders[split])
        if cursor.position > size:
            raise ProblemError(422, f"position {cursor.position} is beyond the {size} prompts of {split.value}")

    def stats(self) -> DataStats:
        """Return the statistics of the source."""
        # Success rates change nothing in the dataset's own order, which is "off" on the wire.
        curriculum = self.orders[Split.TRAIN].curriculum
        return DataStats(
            source=self.dataset.rows.name,
            train_prompts=len(self.orders[Split.TRAIN]),
            test_prompts=len(self.orders[Split.TEST]),
            rows=self.dataset.rows.rows,
            refused=self.dataset.left_out,
            first_refused=self.dataset.rows.first_refused,
            columns=list(self.dataset.rows.columns),
            cursors=self.state.cursors(),
            curriculum=(Curriculum.OFF if curriculum is Curriculum.SOURCE else curriculum).value,
            fingerprint=self.dataset.fingerprint,
        )


_SCHEMA = """
CREATE TABLE IF NOT EXISTS cursors (consumer TEXT PRIMARY KEY, cursor TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answered (consumer TEXT, request_id TEXT, cursor TEXT, PRIMARY KEY (consumer, request_id));
CREATE TABLE IF NOT EXISTS rates (place INTEGER PRIMARY KEY, rate REAL NOT NULL);
CREATE TABLE IF NOT EXISTS epochs (epoch INTEGER PRIMARY KEY, rates BLOB NOT NULL);
"""
_SET_CURSOR = "INSERT OR REPLACE INTO cursors VALUES (?, ?)"
_KEPT_ANSWERS = 20_000


class ServerState:
    """Cursors and success rates. A change is on disk (WAL) when its method returns, and survives a killed process."""

    def __init__(self, directory: Path | None) -> None:
        """Open or create the state in ``directory``, or in memory.

        Raises:
            ConfigurationError: the directory cannot be written.
        """
        self._directory = directory
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
            where = ":memory:" if directory is None else str(directory / "data-server.sqlite")
            self._db = sqlite3.connect(where, isolation_level=None, check_same_thread=False, timeout=1)
            self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"the data-server cannot keep its cursors in {str(directory)!r}: {error}; make SHARED_DIR writable"
            ) from error

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def cursor(self, consumer: str) -> Cursor:
        """Return the cursor of a consumer; a new consumer is at the beginning."""
        return self._find("SELECT cursor FROM cursors WHERE consumer = ?", consumer) or Cursor()

    def cursors(self) -> dict[str, dict[str, int]]:
        """Return epoch and position by consumer, for a thousand consumers at most; each collector is one."""
        rows = self._db.execute("SELECT consumer, cursor FROM cursors LIMIT 1000")
        return {consumer: Cursor.model_validate_json(text).model_dump(exclude={"skip"}) for consumer, text in rows}

    def start_of(self, consumer: str, request_id: str) -> Cursor | None:
        """Return the cursor at which the prompts of an earlier answer to a request began, None for a new request."""
        query = "SELECT cursor FROM answered WHERE consumer = ? AND request_id = ?"
        return self._find(query, consumer, request_id)

    def set_cursor(self, consumer: str, cursor: Cursor) -> None:
        """Set the cursor of a consumer."""
        self._write((_SET_CURSOR, (consumer, cursor.model_dump_json())))

    def advance(self, consumer: str, request_id: str | None, start: Cursor, after: Cursor) -> None:
        """Move a consumer on to ``after`` and note that ``request_id`` was answered from ``start``: both or neither."""
        statements: list[Statement] = [(_SET_CURSOR, (consumer, after.model_dump_json()))]
        if request_id is not None:
            statements.append(
                ("INSERT INTO answered VALUES (?, ?, ?)", (consumer, request_id, start.model_dump_json()))
            )
            oldest = "DELETE FROM answered WHERE rowid <= (SELECT max(rowid) FROM answered) - ?"
            statements.append((oldest, (_KEPT_ANSWERS,)))
        self._write(*statements)

    def record_rates(self, rates: Mapping[int, float]) -> None:
        """Record success rates by the place of their prompt."""
        self._write(*(("INSERT OR REPLACE INTO rates VALUES (?, ?)", rate) for rate in rates.items()))

    def rates_at_start(self, epoch: int, size: int) -> Rates | None:
        """Return the rates (NaN: unknown, shape [size]) at the first call for ``epoch``; None if all are unknown.

        Raises:
            ProblemError: 507, this is the first call, and the disk refuses to keep the rates.
        """
        row = self._db.execute("SELECT rates FROM epochs WHERE epoch = ?", (epoch,)).fetchone()
        if row is None:
            rates = np.full(size, np.nan, np.float32)
            for place, rate in self._db.execute("SELECT place, rate FROM rates"):
                rates[place] = rate
            self._write(("INSERT INTO epochs VALUES (?, ?)", (epoch, rates.tobytes())))
        else:
            rates = np.frombuffer(row[0], np.float32)
        return None if bool(np.isnan(rates).all()) else rates

    def _find(self, query: str, *values: str) -> Cursor | None:
        row = self._db.execute(query, values).fetchone()
        return None if row is None else Cursor.model_validate_json(row[0])

    def _write(self, *statements: Statement) -> None:
        """Execute statements in one transaction.

        Raises:
            ProblemError: 507, the disk refuses to write; nothing was changed.
        """
        try:
            with self._db:
                self._db.execute("BEGIN")
                for statement, values in statements:
                    self._db.execute(statement, values)
        except sqlite3.Error as error:
            where = "" if self._directory is None else f"; {files.free_space(self._directory)}"
            raise ProblemError(507, f"the data-server cannot write its cursors: {error}{where}") from error
