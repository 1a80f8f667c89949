"""The data-server's memory in SQLite: the cursors of its consumers, and success rates."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from services.core import files
from services.core.errors import ConfigurationError
from services.data_server.order import Rates
from services.http.problems import ProblemError
from services.protocol.prompts import Cursor

_SCHEMA = """
CREATE TABLE IF NOT EXISTS cursors (consumer TEXT PRIMARY KEY, cursor TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answered (consumer TEXT, request_id TEXT, cursor TEXT, PRIMARY KEY (consumer, request_id));
CREATE TABLE IF NOT EXISTS rates (place INTEGER PRIMARY KEY, rate REAL NOT NULL);
CREATE TABLE IF NOT EXISTS epochs (epoch INTEGER PRIMARY KEY, rates BLOB NOT NULL);
"""
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
                f"the data-server cannot keep its cursors in {str(directory)!r}: {error}; make SHARED_DIR a directory "
                f"that can be written"
            ) from error
        self._transaction: asyncio.Future[None] | None = None

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
        """Return the cursor from which a request was answered before, None for a new request."""
        query = "SELECT cursor FROM answered WHERE consumer = ? AND request_id = ?"
        return self._find(query, consumer, request_id)

    async def set_cursor(self, consumer: str, cursor: Cursor) -> None:
        """Set the cursor of a consumer."""
        await self._write(lambda: self._put(consumer, cursor))

    async def advance(self, consumer: str, request_id: str | None, start: Cursor, after: Cursor) -> None:
        """Move a consumer on to ``after`` and note that ``request_id`` was answered from ``start``: both or neither.

        The next reader sees the change at once; it is on disk when this method returns.
        """

        def change() -> None:
            self._put(consumer, after)
            if request_id is not None:
                inserted = self._db.execute(
                    "INSERT INTO answered (consumer, request_id, cursor) VALUES (?, ?, ?)",
                    (consumer, request_id, start.model_dump_json()),
                )
                oldest = (inserted.lastrowid or 0) - _KEPT_ANSWERS
                self._db.execute("DELETE FROM answered WHERE rowid <= ?", (oldest,))

        await self._write(change)

    async def record_rates(self, rates: Mapping[int, float]) -> None:
        """Record success rates by the place of their prompt."""
        await self._write(lambda: self._db.executemany("INSERT OR REPLACE INTO rates VALUES (?, ?)", rates.items()))

    def rates_at_start(self, epoch: int, size: int) -> Rates | None:
        """Return the rates (NaN: unknown, shape [size]) at the first call for ``epoch``; None if all are unknown.

        Raises:
            ProblemError: 507, this is the first call, and the disk refuses to keep the rates.
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

    def _find(self, query: str, *values: str) -> Cursor | None:
        found = self._db.execute(query, values).fetchone()
        return None if found is None else Cursor.model_validate_json(found[0])

    def _put(self, consumer: str, cursor: Cursor) -> None:
        self._db.execute("INSERT OR REPLACE INTO cursors VALUES (?, ?)", (consumer, cursor.model_dump_json()))

    async def _write(self, change: Callable[[], object]) -> None:
        """Make a change in the transaction of this turn of the event loop, and return once that is committed.

        Requests of one turn share a transaction, because with fifty clients a transaction for each request would take
        a fifth of the server's time.

        Raises:
            ProblemError: 507, the disk refuses to write; nothing of the transaction was changed.
        """
        if self._transaction is None:
            loop = asyncio.get_running_loop()
            self._transaction = loop.create_future()
            loop.call_soon(self._commit)
        transaction = self._transaction
        try:
            if not self._db.in_transaction:
                self._db.execute("BEGIN")
            change()
        except sqlite3.Error as error:
            self._fail(error)
        await asyncio.shield(transaction)

    def _commit(self) -> None:
        if self._transaction is None:  # A change of this turn failed, which ended the transaction.
            return
        try:
            self._db.commit()
        except sqlite3.Error as error:
            self._fail(error)
        else:
            self._transaction.set_result(None)
            self._transaction = None

    def _fail(self, error: sqlite3.Error) -> None:
        self._db.rollback()
        if self._transaction is not None:
            self._transaction.set_exception(self._refusal(error))
            self._transaction = None

    def _refusal(self, error: sqlite3.Error) -> ProblemError:
        where = "" if self._directory is None else f"; {files.free_space(self._directory)}"
        return ProblemError(507, f"the data-server cannot write its cursors: {error}{where}")
