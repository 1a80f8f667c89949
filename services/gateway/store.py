"""The gateway's sessions in SQLite: what was written is on disk before the write returns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from services.core import files
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.http.problems import ProblemError

T = TypeVar("T")
Statement = tuple[str, tuple[Any, ...]]
Write = tuple[list[Statement], asyncio.Future[None]]

log = get_logger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY,
    request TEXT NOT NULL,      -- CreateSessionRequest as JSON
    created REAL NOT NULL,      -- Unix seconds
    finished INTEGER NOT NULL DEFAULT 0,
    reward REAL,
    reason TEXT
);
CREATE TABLE IF NOT EXISTS calls (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order in which the calls were answered
    session TEXT NOT NULL,
    record BLOB NOT NULL        -- Call.record as JSON
);
CREATE INDEX IF NOT EXISTS calls_of_session ON calls (session, number);
CREATE TABLE IF NOT EXISTS lost (session TEXT NOT NULL, reason TEXT NOT NULL, tokens INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS lost_of_session ON lost (session);
CREATE TABLE IF NOT EXISTS account (name TEXT PRIMARY KEY, tokens INTEGER NOT NULL) WITHOUT ROWID;
"""

# A process that is just ending still holds the lock.
LOCK_SECONDS = 20.0


class Store:
    """The database, which no other process can open meanwhile. One thread runs all statements.

    Writes that arrive while the disk is busy share the next transaction, and so its fsync.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, "gateway-store")
        self._file = directory / "gateway.sqlite"
        self._waiting: list[Write] = []
        self._flushing: asyncio.Task[None] | None = None
        self._db: sqlite3.Connection
        self._inodes: list[int]

    async def open(self) -> None:
        """Open the database, or create it.

        Raises:
            ConfigurationError: the directory cannot be used.
            DependencyLostError: another process uses it.
        """
        await self.run(self._open)

    async def close(self) -> None:
        """Write everything that was asked for and close the database."""
        if self._flushing is not None:
            await self._flushing
        await self.run(self._db.close)
        self._thread.shutdown()

    async def write(self, *statements: Statement) -> None:
        """Execute statements in one transaction and return once it is on disk.

        Raises:
            ProblemError: 507, the disk refuses to write; 500, these statements cannot be executed. Nothing was changed.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((list(statements), done))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        await asyncio.shield(done)

    async def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return await self.run(lambda: self._db.execute(query, values).fetchall())

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _flush(self) -> None:
        """Write everything that waits, transaction by transaction."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            refusal = await self._refusal(batch)
            for write in batch:
                # One of several may be at fault for all.
                why = await self._refusal([write]) if refusal is not None and len(batch) > 1 else refusal
                _, done = write
                if why is None:
                    done.set_result(None)
                else:
                    done.set_exception(why)
        self._flushing = None

    async def _refusal(self, batch: Sequence[Write]) -> ProblemError | None:
        """Write a batch in one transaction, and return None, or why it cannot be written."""
        statements = [statement for those, _ in batch for statement in those]
        try:
            await self.run(lambda: self._commit(statements))
        except (sqlite3.OperationalError, OSError) as error:
            with contextlib.suppress(OSError):
                space = f"; {files.free_space(self._directory)}"
                return ProblemError(507, f"the gateway cannot write its sessions: {error}{space}")
            return ProblemError(507, f"the gateway cannot write its sessions: {error}")
        except Exception as error:  # Whatever it is, nobody may wait for ever.
            log.exception("a write failed", error=repr(error))
            return ProblemError(500, f"the gateway cannot write its sessions: {error!r}; its log has the traceback")
        return None

    def _commit(self, statements: Sequence[Statement]) -> None:
        try:
            self._db.execute("BEGIN")
            for statement, values in statements:
                self._db.execute(statement, values)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite rolls back by itself after some errors.
                self._db.execute("ROLLBACK")
            raise
        if self._find_inodes() != self._inodes:
            raise OSError(f"another file took the place of {str(self._file)!r}")

    def _find_inodes(self) -> list[int]:
        """Return the inodes of the files, because a removed file can still be written."""
        return [os.stat(f"{self._file}{suffix}").st_ino for suffix in ("", "-wal")]

    def _open(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self._file, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
            # The exclusive lock needs no shared memory, which network disks lack.
            self._db.executescript(
                "PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; "
                f"BEGIN EXCLUSIVE; {_SCHEMA} COMMIT"
            )
            self._inodes = self._find_inodes()
        except (OSError, sqlite3.Error) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise DependencyLostError(
                    f"another process uses {str(self._directory)!r}; end it, or give this one another GATEWAY_DIR"
                ) from error
            raise ConfigurationError(
                f"GATEWAY_DIR {str(self._directory)!r} cannot be used: {error}; give a directory on a disk of this "
                f"machine that can be written"
            ) from error
