"""A service's SQLite file: what was written is on disk before the write returns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from services.core import files
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.http.problems import ProblemError

log = get_logger(__name__)

T = TypeVar("T")
OpenedT = TypeVar("OpenedT", bound=sqlite3.Connection)
Statement = tuple[str, tuple[Any, ...]]

# A process that is just ending still holds the lock, and a network disk holds that of a dead machine for a while.
LOCK_SECONDS = 20.0


@dataclass
class Work:
    """Statements to write, or a use of the database outside of any transaction, and the future of the result."""

    statements: Sequence[Statement] = ()
    use: Callable[[], Any] | None = None
    is_alone: bool = False
    """True for a transaction of their own, after one that statements shared has failed."""
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Database:
    """A SQLite file that no other process can open meanwhile; a subclass has its tables and its names in messages.

    A thread does what waits for the disk: it commits and reads. Writes that arrive meanwhile share the next
    transaction, and so its fsync. Statements that write run in the event loop, because they only change pages in memory
    (0.04 ms for a call), whereas a thread would wait for the interpreter several times for each. Callbacks, not tasks,
    begin and end a transaction, because each turn of a busy event loop takes as long as a commit.
    """

    name: ClassVar[str]
    """The name of the file, without its suffix."""
    variable: ClassVar[str]
    """The setting of the directory."""
    format: ClassVar[int]
    """The version of the tables and records."""
    schema: ClassVar[str]
    """The statements that create the tables."""
    unwritten: ClassVar[str]
    """The sentence with which the service refuses a request when the disk is full or broken."""
    loss: ClassVar[str]
    """The loss to the user if the file is removed, for messages."""

    def __init__(self, directory: Path, on_damage: Callable[[Exception], None] = lambda _: None) -> None:
        """Make it; ``on_damage`` gets the error that must end the process, once the file is found damaged."""
        self._directory = directory
        self._on_damage = on_damage
        self._thread = ThreadPoolExecutor(1, f"{self.name}-store")
        self._file = directory / f"{self.name}.sqlite"
        self._waiting: deque[Work] = deque()
        self._is_in_use = False
        self._db: sqlite3.Connection
        self._inodes: list[int]

    async def open(self) -> None:
        """Open the database, or create it.

        Raises:
            ConfigurationError: the directory cannot be used, or the database is damaged.
            DependencyLostError: another process uses it.
        """
        await self.run(self._open)

    async def close(self) -> None:
        """Write everything that was asked for and close the database."""
        await self.run(self._db.close)
        self._thread.shutdown()

    async def write(self, *statements: Statement) -> None:
        """Execute statements in one transaction and return once it is on disk.

        Raises:
            ProblemError: 507, the disk refuses to write; 500, these statements cannot be executed. Nothing was changed.
        """
        await self._ask(Work(statements))

    async def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query.

        Raises:
            ConfigurationError: the database is damaged.
        """
        return await self.run(lambda: self._db.execute(query, values).fetchall())

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the database's thread, after everything that was asked for before."""
        result: T = await self._ask(Work(use=work))
        return result

    def _ask(self, work: Work) -> asyncio.Future[Any]:
        self._waiting.append(work)
        self._begin()
        return work.done

    def _begin(self) -> None:
        """Begin the work that waits longest, with all writes that follow each other, unless the database is in use."""
        if self._is_in_use or not self._waiting:
            return
        self._is_in_use = True
        first = self._waiting.popleft()
        if first.use is not None:
            self._in_thread(first.use, partial(self._end_use, first))
            return
        batch = [first]
        while not first.is_alone and self._waiting and self._waiting[0].use is None:
            batch.append(self._waiting.popleft())
        try:
            self._commit(batch)
        except Exception as error:  # noqa: BLE001  # Whatever it is, nobody may wait for ever.
            asyncio.get_running_loop().call_soon(self._end_writes, batch, error)

    def _in_thread(self, work: Callable[[], Any], then: Callable[[Future[Any]], None]) -> None:
        """Run ``work`` in the thread, then ``then`` in the event loop with the future that has its result or error."""
        loop = asyncio.get_running_loop()
        self._thread.submit(work).add_done_callback(lambda ended: loop.call_soon_threadsafe(then, ended))

    def _end_use(self, work: Work, ended: Future[Any]) -> None:
        self._is_in_use = False
        self._begin()
        if (error := ended.exception()) is None:
            _settle(work.done, ended.result(), None)
        else:
            _settle(work.done, None, self._damage(error) or error)

    def _damage(self, error: BaseException) -> ConfigurationError | None:
        """Return the error that ends the process, and report it, if ``error`` says that the file is damaged."""
        damage = database_damage(error, self._file, self.loss)
        if damage is not None:
            self._on_damage(damage)
        return damage

    def _commit(self, batch: Sequence[Work]) -> None:
        """Execute the statements of a batch, and let the thread commit them."""
        self._db.execute("BEGIN")
        for write in batch:
            for statement, values in write.statements:
                self._db.execute(statement, values)
        self._in_thread(lambda: self._db.execute("COMMIT"), lambda ended: self._end_writes(batch, ended.exception()))

    def _end_writes(self, batch: Sequence[Work], error: BaseException | None) -> None:
        """Tell those who wait for a transaction its end; writes that failed together are tried one by one."""
        try:
            if error is None and self._find_inodes() != self._inodes:
                error = OSError(f"another file took the place of {str(self._file)!r}")
            if self._db.in_transaction:  # SQLite rolls back by itself after some errors.
                self._db.execute("ROLLBACK")
        except (sqlite3.Error, OSError) as failure:
            error = error or failure
        self._is_in_use = False
        if error is not None and len(batch) > 1:
            self._waiting.extendleft(Work(w.statements, is_alone=True, done=w.done) for w in reversed(batch))
        else:
            refusal = None if error is None else self._damage(error) or self._refusal(error)
            for write in batch:
                _settle(write.done, None, refusal)
        self._begin()

    def _refusal(self, error: BaseException) -> ProblemError:
        """Return the refusal of a write that failed with ``error``."""
        if isinstance(error, sqlite3.OperationalError | OSError):
            space = ""
            with contextlib.suppress(OSError):
                space = f"; {files.free_space(self._directory)}"
            return ProblemError(507, f"{self.unwritten}: {error}{space}")
        log.error("a write failed", error=repr(error), exc_info=error)
        return ProblemError(500, f"{self.unwritten}: {error!r}; its log has the traceback")

    def _find_inodes(self) -> list[int]:
        """Return the inodes of the files, because a removed file can still be written."""
        return [os.stat(f"{self._file}{suffix}").st_ino for suffix in ("", "-wal")]

    def _open(self) -> None:
        self._db = open_database(self._file, sqlite3.Connection, self.variable, self.format, self.schema, self.loss)
        try:
            # Such files have some MB, which are read in no time.
            [(verdict,)] = self._db.execute("PRAGMA integrity_check(1)")
            if verdict != "ok":
                raise sqlite3.DatabaseError(" ".join(verdict.split()))
        except sqlite3.DatabaseError as error:
            raise self._damage(error) or error from error
        self._inodes = self._find_inodes()


def open_database(
    file: Path, kind: type[OpenedT], variable: str, version: int, schema: str, loss: str, pragmas: str = ""
) -> OpenedT:
    """Open a service's SQLite file, or create it; what a transaction has committed survives a loss of power.

    Args:
        file: no other process can open it meanwhile.
        kind: the class of the connection.
        variable: the setting of the file's directory, for messages.
        version: the version of tables and records.
        schema: the statements that create the tables.
        loss: the loss to the user if the file is removed, for messages.
        pragmas: executed before any table is there.

    Raises:
        ConfigurationError: the directory cannot be used, or the file is damaged or of another version.
        DependencyLostError: another process uses it.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(
            file, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False, factory=kind
        )
        # The exclusive lock needs no shared memory, which network disks lack.
        database.executescript(
            f"{pragmas}PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL"
        )
        [(stored,)] = database.execute("PRAGMA user_version")
        [(tables,)] = database.execute("SELECT count(*) FROM sqlite_master")
        if tables and stored != version:
            raise ConfigurationError(
                f"{str(file)!r} was written by another version of this program (its format is {stored}, this program "
                f"reads {version}); continue with that version, or begin a new run"
            )
        database.execute(f"PRAGMA user_version = {version}")
        database.executescript(f"BEGIN EXCLUSIVE; {schema} COMMIT")
    except (OSError, sqlite3.Error) as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            raise DependencyLostError(
                f"another process uses {str(file.parent)!r}; end it, or give this one another {variable}"
            ) from error
        raise database_damage(error, file, loss) or ConfigurationError(
            f"{variable} {str(file.parent)!r} cannot be used: {error}; give a writable directory on this machine's disk"
        ) from error
    return database


def database_damage(error: BaseException, file: Path, loss: str) -> ConfigurationError | None:
    """Return the error that ends a service whose SQLite file is damaged; None for an error of another cause.

    Args:
        error: SQLite's error.
        file: the damaged file.
        loss: the end of the message, which says what the user loses without the file.
    """
    # Other causes have a subclass: a full disk, a lock, a statement that cannot be executed.
    is_damage = type(error) is sqlite3.DatabaseError or "Could not decode to UTF-8" in str(error)
    if not is_damage or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
        return None
    return ConfigurationError(
        f"{str(file)!r} is damaged: {error}; check its disk, move its directory away and start again: {loss}"
    )


def _settle(done: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    """Set the result or error of ``done``, unless nobody waits for it any more."""
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
