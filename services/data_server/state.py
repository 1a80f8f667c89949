"""What the data-server remembers: cursors of its consumers and success rates, in SQLite, on disk where one is given."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from services.data_server.order import Rates
from services.errors import ConfigurationError
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
    """Cursors and success rates. What is written survives the death of the process at once (SQLite's WAL)."""

    def __init__(self, directory: Path | None, identity: str) -> None:
        """Opens or makes the state in ``directory``, or in memory.

        Raises:
            ConfigurationError: the directory cannot be written, or holds the state of another dataset or order.
        """
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
            where = ":memory:" if directory is None else str(directory / "data-server.sqlite")
            self._db = sqlite3.connect(where, isolation_level=None, check_same_thread=False)
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

    def close(self) -> None:
        """Closes the database."""
        self._db.close()

    def cursor(self, consumer: str) -> Cursor:
        """Where a consumer stands; a new one stands at the beginning."""
        found = self._db.execute("SELECT cursor FROM cursors WHERE consumer = ?", (consumer,)).fetchone()
        return Cursor() if found is None else Cursor.model_validate_json(found[0])

    def set_cursor(self, consumer: str, cursor: Cursor) -> None:
        """Sets where a consumer stands."""
        self._db.execute("INSERT OR REPLACE INTO cursors VALUES (?, ?)", (consumer, cursor.model_dump_json()))

    def start_of(self, consumer: str, request_id: str) -> Cursor | None:
        """The cursor from which a request was answered before, None for a new one."""
        found = self._db.execute(
            "SELECT cursor FROM answered WHERE consumer = ? AND request_id = ?", (consumer, request_id)
        ).fetchone()
        return None if found is None else Cursor.model_validate_json(found[0])

    def advance(self, consumer: str, request_id: str | None, start: Cursor, after: Cursor) -> None:
        """Moves a consumer on and remembers from where a request was answered, both or neither."""
        self._db.execute("BEGIN")
        if request_id is not None:
            inserted = self._db.execute(
                "INSERT INTO answered (consumer, request_id, cursor) VALUES (?, ?, ?)",
                (consumer, request_id, start.model_dump_json()),
            )
            self._db.execute("DELETE FROM answered WHERE number <= ?", ((inserted.lastrowid or 0) - _KEPT_ANSWERS,))
        self.set_cursor(consumer, after)
        self._db.execute("COMMIT")

    def cursors(self) -> dict[str, dict[str, int]]:
        """Epoch and position by consumer, of a hundred at most."""
        rows = self._db.execute("SELECT consumer, cursor FROM cursors LIMIT 100").fetchall()
        return {
            consumer: {key: value for key, value in json.loads(text).items() if key in ("epoch", "position")}
            for consumer, text in rows
        }

    def record_rates(self, rates: Mapping[int, float]) -> None:
        """Records success rates by place."""
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO rates VALUES (?, ?)", rates.items())
        self._db.execute("COMMIT")

    def rates_at_start(self, epoch: int, size: int) -> Rates | None:
        """The rates (NaN: unknown, shape [size]) as they were when ``epoch`` was first asked for; None before any."""
        found = self._db.execute("SELECT rates FROM epochs WHERE epoch = ?", (epoch,)).fetchone()
        if found is None:
            rates = np.full(size, np.nan, np.float32)
            for place, rate in self._db.execute("SELECT place, rate FROM rates"):
                rates[place] = rate
            self._db.execute("INSERT INTO epochs VALUES (?, ?)", (epoch, rates.tobytes()))
        else:
            rates = np.frombuffer(found[0], np.float32)
        return None if bool(np.isnan(rates).all()) else rates
