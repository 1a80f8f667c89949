"""The buffer on disk: an LMDB environment, written in transactions that are either whole or not there.

A record is a group, or an experience without tokens. It has a sequence number that is never used again, a small
``meta`` entry, and its contents. ``meta`` outlives the contents: it is how an id stays known after the record is gone.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, TypeVar

import lmdb
import orjson

from services.core import files
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.problems import ProblemError

T = TypeVar("T")

_KEY = struct.Struct(">Q")
_META = struct.Struct("<BBQQIdd")
_FIRST_MAP_BYTES = 256 * 2**20
_LOCK_SECONDS = 20.0


class Kind(IntEnum):
    """What a record is."""

    GROUP = 0
    EXPERIENCE = 1


class Place(IntEnum):
    """Where a record is."""

    STORE = 0
    QUEUE = 1
    GONE = 2


@dataclass(frozen=True, slots=True)
class Meta:
    """All of a record but its contents. ``rank`` and ``slot`` mean something in the store only."""

    id: str
    kind: Kind
    place: Place
    version: int
    priority: float
    rank: int = 0
    slot: int = 0
    stored_at: float = 0.0

    def to_bytes(self) -> bytes:
        """As kept on disk."""
        head = _META.pack(self.kind, self.place, self.version, self.rank, self.slot, self.priority, self.stored_at)
        return head + self.id.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Meta:
        """The reverse of ``to_bytes``."""
        kind, place, version, rank, slot, priority, stored_at = _META.unpack_from(data)
        record_id = data[_META.size :].decode()
        return cls(record_id, Kind(kind), Place(place), version, priority, rank, slot, stored_at)


class Transaction:
    """Reads and writes of one LMDB transaction."""

    def __init__(self, storage: Storage, txn: Any) -> None:
        self._storage = storage
        self._txn = txn

    def meta(self, sequence: int) -> Meta | None:
        """The meta entry of a record."""
        data = self._txn.get(_KEY.pack(sequence), db=self._storage.metas)
        return None if data is None else Meta.from_bytes(bytes(data))

    def metas(self, start: int = 0) -> Iterator[tuple[int, Meta]]:
        """All meta entries from sequence ``start`` on, in order."""
        cursor = self._txn.cursor(db=self._storage.metas)
        if cursor.set_range(_KEY.pack(start)):
            for key, data in cursor:
                yield _KEY.unpack(key)[0], Meta.from_bytes(bytes(data))

    def put_meta(self, sequence: int, meta: Meta) -> None:
        """Writes a meta entry."""
        self._txn.put(_KEY.pack(sequence), meta.to_bytes(), db=self._storage.metas)

    def change_meta(self, sequence: int, **changes: Any) -> None:
        """Changes fields of a meta entry that exists."""
        meta = self.meta(sequence)
        assert meta is not None
        self.put_meta(sequence, replace(meta, **changes))

    def delete_meta(self, sequence: int) -> None:
        """Deletes a meta entry."""
        self._txn.delete(_KEY.pack(sequence), db=self._storage.metas)

    def contents(self, sequence: int) -> memoryview | None:
        """The contents of a record, valid within this transaction."""
        data: memoryview | None = self._txn.get(_KEY.pack(sequence), db=self._storage.payloads)
        return data

    def put_contents(self, sequence: int, data: bytes) -> None:
        """Writes the contents of a record."""
        # Sequences only grow, so pages fill up one after the other.
        self._txn.put(_KEY.pack(sequence), data, db=self._storage.payloads, append=True)

    def delete_contents(self, sequence: int) -> None:
        """Deletes the contents of a record."""
        self._txn.delete(_KEY.pack(sequence), db=self._storage.payloads)

    def sequence_of(self, record_id: str) -> int | None:
        """The sequence of a known id."""
        data = self._txn.get(_digest(record_id), db=self._storage.ids)
        return None if data is None else _KEY.unpack(data)[0]

    def know(self, record_id: str, sequence: int) -> None:
        """Makes an id known."""
        self._txn.put(_digest(record_id), _KEY.pack(sequence), db=self._storage.ids)

    def forget(self, record_id: str, sequence: int) -> None:
        """Makes an id unknown, if it stands for that sequence."""
        if self.sequence_of(record_id) == sequence:
            self._txn.delete(_digest(record_id), db=self._storage.ids)

    def get(self, key: str) -> Any:
        """A JSON value among the buffer's own notes; None where there is none."""
        data = self._txn.get(key.encode(), db=self._storage.notes)
        return None if data is None else orjson.loads(data)

    def put(self, key: str, value: Any) -> None:
        """Writes a note."""
        self._txn.put(key.encode(), orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), db=self._storage.notes)

    def delete(self, key: str) -> None:
        """Deletes a note."""
        self._txn.delete(key.encode(), db=self._storage.notes)

    def notes(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """All notes whose key begins with ``prefix``: the rest of the key, and the value."""
        cursor = self._txn.cursor(db=self._storage.notes)
        if cursor.set_range(prefix.encode()):
            for key, data in cursor:
                name = bytes(key).decode()
                if not name.startswith(prefix):
                    return
                yield name.removeprefix(prefix), orjson.loads(data)


class Storage:
    """An LMDB environment of our own. Used from one thread."""

    def __init__(self, directory: Path, *, fsync: bool, max_bytes: int) -> None:
        """Opens or makes the environment in ``directory``.

        With ``fsync``, a committed transaction survives a loss of power; without it, the death of the process.

        Raises:
            ConfigurationError: the directory cannot be used.
            DependencyLostError: another process still uses it.
        """
        self._directory = directory
        self._fsync = fsync
        self._max_bytes = max_bytes
        self._env: Any = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(directory / "in-use")
            self._open()
        except (OSError, lmdb.Error) as error:
            raise ConfigurationError(
                f"REPLAY_DIR {str(directory)!r} cannot be used: {error}; give a directory on a disk of this machine "
                f"that can be written"
            ) from error

    def read(self, work: Callable[[Transaction], T]) -> T:
        """Runs ``work`` in a transaction that sees one state of the environment."""
        with self._begin() as txn:
            return work(Transaction(self, txn))

    def write(self, work: Callable[[Transaction], T]) -> T:
        """Runs ``work`` in a transaction; when this returns, what it wrote is kept, and when it raises, nothing is.

        ``work`` may run again, so it must change nothing but the transaction.

        Raises:
            ProblemError: 507, the disk or the space allowed is used up.
        """
        while True:
            try:
                with self._begin(write=True) as txn:
                    return work(Transaction(self, txn))
            except lmdb.MapFullError as error:
                self._grow(error)
            except lmdb.Error as error:
                if not self._says_disk_full(error):
                    raise
                raise ProblemError(
                    507,
                    f"the replay-buffer's disk is full: {error}; {files.free_space(self._directory)}: make room there",
                ) from error

    @property
    def used_bytes(self) -> int:
        """How much of the disk the environment takes."""
        info, stat = self._env.info(), self._env.stat()
        used: int = (info["last_pgno"] + 1) * stat["psize"]
        return used

    def close(self) -> None:
        """Closes the environment and lets others have the directory."""
        self._env.sync(True)
        self._env.close()
        self._lock.close()

    def _open(self) -> None:
        used = self._directory / "data.mdb"
        size = max(_FIRST_MAP_BYTES, 2 * used.stat().st_size if used.exists() else 0)
        # One process, by the lock file, and one thread: LMDB needs no lock of its own, which some network disks lack.
        env = lmdb.open(
            str(self._directory),
            map_size=min(size, self._max_bytes),
            max_dbs=8,
            sync=self._fsync,
            metasync=self._fsync,
            lock=False,
        )
        self.metas = env.open_db(b"metas")
        self.payloads = env.open_db(b"payloads")
        self.ids = env.open_db(b"ids")
        self.notes = env.open_db(b"notes")
        self._env = env

    def _begin(self, *, write: bool = False) -> Any:
        """Begin a transaction; open the environment anew where LMDB gave it up.

        LMDB refuses every transaction after it could not write its first pages; what is on the disk is whole.
        """
        if self._env is not None:
            try:
                return self._env.begin(write=write, buffers=True)
            except lmdb.PanicError:
                self._env.close()
                self._env = None
        self._open()
        return self._env.begin(write=write, buffers=True)

    def _says_disk_full(self, error: lmdb.Error) -> bool:
        """Return whether the disk, a quota or the largest size of a file is used up; LMDB tells in words only."""
        if isinstance(error, lmdb.DiskError):
            return True
        if any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            return True
        # LMDB's word for a write of which the disk took a part only.
        return os.strerror(errno.EIO) in str(error) and files.is_full(self._directory)

    def _grow(self, error: lmdb.MapFullError) -> None:
        size: int = self._env.info()["map_size"]
        if size >= self._max_bytes:
            raise ProblemError(
                507,
                f"the groups take {size / 2**30:.1f} GB, all that REPLAY_MAX_GB allows; "
                f"{files.free_space(self._directory)}: allow more, or keep fewer",
            ) from error
        self._env.set_mapsize(min(2 * size, self._max_bytes))


def _lock(path: Path) -> IO[bytes]:
    """Takes the directory for this process; waits a little for one that is just ending.

    A directory on a network disk can stay locked for a while after its machine died; a restart may then succeed.
    """
    lock = path.open("wb")
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise DependencyLostError(
                    f"another process uses {str(path.parent)!r}; end it, or give this one another REPLAY_DIR"
                ) from None
            time.sleep(0.1)
        else:
            return lock


def _digest(record_id: str) -> bytes:
    # Ids may be longer than LMDB's keys.
    return hashlib.blake2b(record_id.encode(), digest_size=16).digest()
