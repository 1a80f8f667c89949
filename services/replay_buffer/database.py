"""The SQLite file of the replay buffer: its tables and its transactions.

A snapshot is a row with the list of the members that it had; contents are never copied, and go with the last snapshot
that names them.

Queries that need a few of the many members have CROSS JOIN, which fixes the order of the tables, or INDEXED BY, because
SQLite's planner would otherwise read all members.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.core import files
from services.core.errors import ConfigurationError
from services.http.database import database_damage, open_database
from services.http.problems import ProblemError
from services.protocol.groups import FORMAT, GroupFormatError, check_format

_SCHEMA = """
-- A group as ``pack`` writes it, or the JSON of an experience without tokens. A sequence number is never used again.
CREATE TABLE IF NOT EXISTS contents (sequence INTEGER PRIMARY KEY AUTOINCREMENT, data BLOB NOT NULL);

-- Group ids that were added. An id stays known after its group is gone, so that a late repetition adds nothing.
CREATE TABLE IF NOT EXISTS known (sequence INTEGER PRIMARY KEY, group_id TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS known_by_id ON known (group_id);

CREATE TABLE IF NOT EXISTS members (
    sequence INTEGER PRIMARY KEY,
    place TEXT NOT NULL,        -- 'store', 'queue' or 'experiences'
    position INTEGER NOT NULL,  -- order of arrival in the store; 0 in the queue, whose order is the sequence
    version INTEGER NOT NULL,   -- oldest policy version of the group's tokens
    priority REAL NOT NULL,
    source TEXT NOT NULL,       -- of the group's prompt
    lease TEXT                  -- in the queue: the lease that holds the group
);
CREATE INDEX IF NOT EXISTS queued ON members (lease, sequence) WHERE place = 'queue';

-- The members as JSON, without their leases; and the ranges of sequence numbers that were added on the way to the
-- snapshot, within which an id is known. A restore begins a new range, so that ids added after the snapshot are unknown
-- again. The label of the present is empty.
CREATE TABLE IF NOT EXISTS snapshots (label TEXT PRIMARY KEY, ranges TEXT NOT NULL, members TEXT NOT NULL);
INSERT OR IGNORE INTO snapshots VALUES ('', '[[1, 9223372036854775807]]', '[]');

-- An expired lease stays known for a while: see FreshQueue.acknowledge.
CREATE TABLE IF NOT EXISTS leases (
    id TEXT PRIMARY KEY,
    consumer TEXT NOT NULL,
    request_id TEXT,
    sequences TEXT NOT NULL,    -- JSON list
    expires_at REAL NOT NULL,   -- Unix seconds
    expired INTEGER NOT NULL DEFAULT 0
);
"""

MAX_BYTES = 64 * 2**30
"""Largest file, beyond which additions are refused with 507, so that collectors without a trainer fill no disk."""
_FILE = "replay-buffer.sqlite"
_FORMAT = 10 * FORMAT + 1
"""The version of the groups, and of the tables."""
_LOSS = "the groups in it are lost, and the run continues without them"

# A group takes several pages of SQLite's default of 4 KiB; larger pages make fewer of them.
_PAGE_BYTES = 16 * 2**10


class Database(sqlite3.Connection):
    """The connection to the file, which no other process can open meanwhile. Used from one thread at a time."""

    _directory: Path

    @classmethod
    def open(cls, directory: Path) -> Database:
        """Open the file in ``directory``, or create it; raises as ``open_database`` does. It may grow to MAX_BYTES."""
        # Deleted contents need no overwriting.
        pragmas = f"PRAGMA page_size = {_PAGE_BYTES}; PRAGMA secure_delete = OFF; "
        database = open_database(directory / _FILE, cls, "REPLAY_DIR", _FORMAT, _SCHEMA, _LOSS, pragmas)
        database._directory = directory
        return database

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep everything that the block writes, on disk, or nothing of it if the block raises.

        Raises:
            ProblemError: 507, the disk or the space allowed is used up.
        """
        before = self.used_bytes
        try:
            self.execute("BEGIN")
            yield
            if self.used_bytes > max(before, MAX_BYTES):
                room = f"all that is allowed; {files.free_space(self._directory)}"
                remedy = "train on the waiting groups, or end their collectors"
                raise ProblemError(507, f"the groups take {before / 2**30:.1f} GB, {room}: {remedy}")
            self.execute("COMMIT")
        except BaseException as error:
            if self.in_transaction:  # SQLite rolls back by itself after some errors.
                self.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error) and self._says_disk_full(error):
                room = files.free_space(self._directory)
                raise ProblemError(507, f"replay-buffer's disk is full: {error}; {room}: make room there") from error
            raise

    @property
    def used_bytes(self) -> int:
        """The size of the file once everything is written to it, without the log of the last transactions."""
        return int(self.execute("PRAGMA page_count").fetchone()[0]) * _PAGE_BYTES

    @property
    def newest_sequence(self) -> int:
        """The highest sequence number used so far, 0 before any."""
        row = self.execute("SELECT seq FROM sqlite_sequence WHERE name = 'contents'").fetchone()
        return 0 if row is None else row[0]

    def contents(self, sequences: Iterable[int]) -> list[bytes]:
        """Return the contents of records, leaving out records that are gone."""
        cursors = (self.execute("SELECT data FROM contents WHERE sequence = ?", (number,)) for number in sequences)
        return [row[0] for cursor in cursors for row in cursor]

    def groups(self, sequences: Iterable[int]) -> list[bytes]:
        """Return packed groups, leaving out groups that are gone.

        Raises:
            sqlite3.DatabaseError: the contents of one are damaged.
        """
        try:
            for data in (packed := self.contents(sequences)):
                check_format(data)
        except GroupFormatError as error:
            raise sqlite3.DatabaseError(f"a group in it cannot be read: {error}") from error
        return packed

    def _says_disk_full(self, error: sqlite3.Error) -> bool:
        """Return whether the disk is used up: SQLite says so, or a write failed while hardly anything is free."""
        primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
        return primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and files.is_full(self._directory))


def damage(error: BaseException, directory: Path) -> ConfigurationError | None:
    """Return the error that ends the process if ``error`` says that the file is damaged, None otherwise."""
    return database_damage(error, directory / _FILE, _LOSS)
