"""What the data-server remembers: cursors of its consumers and success rates, in SQLite, on disk where one is given."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

import numpy as np

from services.core import files
from services.core.errors import ConfigurationError
from services.data_server.order import Rates
from services.http.problems import ProblemError
from services.protocol import Cursor

_SCHEMA = """
CREATE TABLE IF NOT EXISTS identity (name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS cursors (consumer TEXT PRIMARY KEY, cursor TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answered (
    number INTEGER PRIMARY KEY, consumer TEXT NOT NULL, request_id TEXT NOT NULL, cursor TEXT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS answered_by_request ON answered (consumer, request_id);
CREATE TABLE IF NOT EXISTS rates (place INTEGER PRIMARY KEY, rate REAL NOT NULL);
CREATE TABLE IF NOT EXISTS epochs (epoch INTEGER PRIMARY KEY, rates BLOB NOT NULL);
"""
_KEPT_ANSWERS = 20_000


class ServerState:
    """Cursors and success rates. What was written when a method returns survives the death of the process (WAL)."""

    def __init__(self, directory: Path | None, identity: str) -> None:
        """Opens or makes the state in ``directory``, or in memory.

        Raises:
            ConfigurationError: the directory cannot be written, or holds the state of another dataset or order.
        """
        self._directory = directory
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
            where = ":memory:" if directory is None else str(directory / "data-server.sqlite")
            self._db = sqlite3.connect(where, isolation_level=None, check_same_thread=False, timeout=1)
            self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _SCHEMA)
            known = self._db.execute("SELECT name FROM identity").fetchone()
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"DATA_STATE_DIR {str(directory)!r} cannot be used: {error}; give a directory that can be written"
            ) from error
        if known is None:
            self._db.execute("INSERT INTO identity VALUES (?)", (identity,))
        elif known[0] != identity:
            raise ConfigurationError(
                f"DATA_STATE_DIR {str(directory)!r} holds cursors of {known[0]}, but this server has {identity}; "
                f"give another directory or remove that one"
            )
        self._cursors = self._read_cursors()
        self._transaction: asyncio.Future[None] | None = None

    def close(self) -> None:
        """Closes the database."""
        self._db.close()

    def cursor(self, consumer: str) -> Cursor:
        """Where a consumer stands; a new one stands at the beginning."""
        return self._cursors.get(consumer) or Cursor()

    async def set_cursor(self, consumer: str, cursor: Cursor) -> None:
        """Sets where a consumer stands."""
        await self._write(lambda: self._put(consumer, cursor))

    def start_of(self, consumer: str, request_id: str) -> Cursor | None:
        """The cursor from which a request was answered before, None for a new one."""
        found = self._db.execute(
            "SELECT cursor FROM answered WHERE consumer = ? AND request_id = ?", (consumer, request_id)
        ).fetchone()
        return None if found is None else Cursor.model_validate_json(found[0])

    async def advance(self, consumer: str, request_id: str | None, start: Cursor, after: Cursor) -> None:
        """Moves a consumer on and remembers from where a request was answered, both or neither.

        Whoever asks next sees it at once; it is on disk when this returns.
        """

        def change() -> None:
            self._put(consumer, after)
            if request_id is not None:
                inserted = self._db.execute(
                    "INSERT INTO answered (consumer, request_id, cursor) VALUES (?, ?, ?)",
                    (consumer, request_id, start.model_dump_json()),
                )
                oldest = (inserted.lastrowid or 0) - _KEPT_ANSWERS
                self._db.execute("DELETE FROM answered WHERE number <= ?", (oldest,))

        await self._write(change)

    async def record_rates(self, rates: Mapping[int, float]) -> None:
        """Records success rates by place."""
        await self._write(lambda: self._db.executemany("INSERT OR REPLACE INTO rates VALUES (?, ?)", rates.items()))

    def _put(self, consumer: str, cursor: Cursor) -> None:
        self._db.execute("INSERT OR REPLACE INTO cursors VALUES (?, ?)", (consumer, cursor.model_dump_json()))
        self._cursors[consumer] = cursor

    async def _write(self, change: Callable[[], object]) -> None:
        """Makes a change within the transaction of this turn of the event loop and returns when that is committed.

        With fifty clients, a transaction for each request would be a fifth of the server's time.

        Raises:
            ProblemError: 507, the disk refuses to write; nothing of the transaction was changed.
        """
        if self._transaction is None:
            loop = asyncio.get_running_loop()
            try:
                self._db.execute("BEGIN")
            except sqlite3.Error as error:
                raise self._refusal(error) from error
            self._transaction = loop.create_future()
            loop.call_soon(self._commit, self._transaction)
        transaction = self._transaction
        try:
            change()
        except sqlite3.Error as error:
            self._roll_back(transaction, error)
        await asyncio.shield(transaction)

    def _commit(self, transaction: asyncio.Future[None]) -> None:
        if transaction is not self._transaction:  # It was rolled back.
            return
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back(transaction, error)
        else:
            self._transaction = None
            transaction.set_result(None)

    def _roll_back(self, transaction: asyncio.Future[None], error: sqlite3.Error) -> None:
        if self._db.in_transaction:  # SQLite ends it by itself after some errors.
            self._db.execute("ROLLBACK")
        self._transaction = None
        self._cursors = self._read_cursors()
        transaction.set_exception(self._refusal(error))

    def _refusal(self, error: sqlite3.Error) -> ProblemError:
        where = "" if self._directory is None else f"; {files.free_space(self._directory)}"
        return ProblemError(507, f"the data-server cannot write its cursors: {error}{where}")

    def _read_cursors(self) -> dict[str, Cursor]:
        rows = self._db.execute("SELECT consumer, cursor FROM cursors")
        return {consumer: Cursor.model_validate_json(text) for consumer, text in rows}

    def cursors(self) -> dict[str, dict[str, int]]:
        """Epoch and position by consumer, of a hundred at most."""
        return {
            consumer: {"epoch": cursor.epoch, "position": cursor.position}
            for consumer, cursor in islice(self._cursors.items(), 100)
        }

    def rates_at_start(self, epoch: int, size: int) -> Rates | None:
        """Return the rates (NaN: unknown, shape [size]) at the first request for ``epoch``; None before any.

        Raises:
            ProblemError: 507, it is asked for now, and the disk refuses to keep them.
        """
        found = self._db.execute("SELECT rates FROM epochs WHERE epoch = ?", (epoch,)).fetchone()
        if found is None:
            rates = np.full(size, np.nan, np.float32)
            for place, rate in self._db.execute("SELECT place, rate FROM rates"):
                rates[place] = rate
            try:
                self._db.execute("INSERT INTO epochs VALUES (?, ?)", (epoch, rates.tobytes()))
            except sqlite3.Error as error:
                raise self._refusal(error) from error
        else:
            rates = np.frombuffer(found[0], np.float32)
        return None if bool(np.isnan(rates).all()) else rates
