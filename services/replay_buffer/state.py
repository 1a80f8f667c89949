"""What the buffer holds, in memory and on disk, and the changes that store, queue and snapshots are made of.

A change is made in memory and noted for the disk at once; ``State.change`` writes the notes in one transaction, and
reads everything back should that fail. So what a caller was told is what a restart finds. Used from one thread.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.protocol import Group
from services.replay_buffer.packing import pack
from services.replay_buffer.queue import FreshQueue, Lease, Waiting
from services.replay_buffer.settings import ReplaySettings
from services.replay_buffer.shelf import Entry, Shelf
from services.replay_buffer.snapshots import Kept, Lineage, Snapshot
from services.replay_buffer.storage import Kind, Meta, Place, Storage, Transaction

# So many ids of records that are gone stay known; beyond it the oldest are forgotten.
KNOWN_GONE = 1_000_000
_TRIMMED_AT_ONCE = 1000


@dataclass(frozen=True)
class NewRecord:
    """A record to be added; a priority of None gets the highest there is."""

    id: str
    version: int
    priority: float | None
    contents: bytes

    @classmethod
    def of(cls, group: Group, priority: float | None) -> NewRecord:
        """A group as a record."""
        return cls(group.group_id, group.policy_version, priority, pack(group))


class State:
    """The records of the buffer. Times are Unix seconds, from ``clock``."""

    def __init__(self, settings: ReplaySettings, *, clock: Callable[[], float] = time.time) -> None:
        """Opens the files and reads all but the contents; ConfigurationError where that is impossible."""
        self.settings = settings
        self.clock = clock
        self.storage = Storage(
            settings.directory, fsync=settings.replay_fsync, max_bytes=int(settings.replay_max_gb * 2**30)
        )
        self.counts: Counter[str] = Counter()
        self.storage.read(self._load)

    def close(self) -> None:
        """Closes the files."""
        self.storage.close()

    @property
    def groups(self) -> Shelf:
        """The groups to draw from."""
        return self.shelves[Kind.GROUP]

    @property
    def experiences(self) -> Shelf:
        """The experiences without tokens to draw from."""
        return self.shelves[Kind.EXPERIENCE]

    @property
    def lineage(self) -> Lineage:
        """The sequences that led to this state."""
        return self.past.until(self.since, self.next_sequence)

    @contextmanager
    def change(self) -> Iterator[Change]:
        """A change that is kept, on disk too, when the block ends, and undone when it raises."""
        change = Change(self)
        try:
            yield change
            self.storage.write(change.write)
        except BaseException:
            self.reload()
            raise

    def reload(self) -> None:
        """Reads everything in memory anew from disk."""
        self.storage.read(self._load)

    def _load(self, txn: Transaction) -> None:
        stored: dict[Kind, list[tuple[Entry, float]]] = {kind: [] for kind in Kind}
        self.queue = FreshQueue()
        self.gone = 0
        for sequence, meta in txn.metas():
            if meta.place is Place.STORE:
                entry = Entry(meta.id, sequence, meta.rank, meta.slot, meta.version, meta.stored_at)
                stored[meta.kind].append((entry, meta.priority))
            elif meta.place is Place.QUEUE:
                self.queue.add(Waiting(meta.id, sequence, meta.version, meta.priority))
            else:
                self.gone += 1
        self.shelves = {
            kind: Shelf(sorted(records, key=lambda record: record[0].rank)) for kind, records in stored.items()
        }
        for _, lease in txn.notes("lease/"):
            self.queue.restored(Lease(**lease))
        self.kept = Kept((label, Snapshot.from_json(data)) for label, data in txn.notes("snapshot/"))
        self.next_sequence: int = txn.get("next_sequence") or 0
        # The present lineage is the past one and every sequence since the last restore.
        past = txn.get("lineage") or {"intervals": [], "since": 0}
        self.past = Lineage(tuple((start, end) for start, end in past["intervals"]))
        self.since: int = past["since"]
        self.newest_version: int | None = txn.get("newest_version")
        self.random = np.random.Generator(np.random.PCG64(self.settings.replay_seed))
        if (state := txn.get("random_state")) is not None:
            self.random.bit_generator.state = json.loads(state)
        self.trimmed_to = 0


class Change:
    """A change under way: each method makes its part in memory and notes it for the disk."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._writes: list[Callable[[Transaction], Any]] = []

    def write(self, txn: Transaction) -> None:
        """Writes what was noted. May be run again in a new transaction."""
        for write in self._writes:
            write(txn)
        txn.put("next_sequence", self._state.next_sequence)
        txn.put("newest_version", self._state.newest_version)

    def note(self, key: str, value: Any) -> None:
        """Writes one of the buffer's own notes."""
        self._writes.append(lambda txn: txn.put(key, value))

    def delete_note(self, key: str) -> None:
        """Deletes a note."""
        self._writes.append(lambda txn: txn.delete(key))

    def number(self) -> int:
        """The next number in the order of all records and ranks."""
        self._state.next_sequence += 1
        return self._state.next_sequence - 1

    def saw_version(self, version: int) -> None:
        """Notes a policy version: the newest one is what staleness is counted from."""
        newest = self._state.newest_version
        if newest is None or version > newest:
            self._state.newest_version = version

    def create(self, kind: Kind, record: NewRecord) -> Waiting:
        """A new record with its contents; ``shelve`` or ``enqueue`` gives it its place."""
        sequence = self.number()
        self.saw_version(record.version)
        self._writes.append(lambda txn: txn.put_contents(sequence, record.contents))
        if kind is Kind.GROUP:
            self._writes.append(lambda txn: txn.know(record.id, sequence))
        priority = self._state.shelves[kind].highest_priority() if record.priority is None else record.priority
        return Waiting(record.id, sequence, record.version, priority)

    def enqueue(self, group: Waiting) -> None:
        """Puts a group into the queue."""
        self._state.queue.add(group)
        self._put(group.sequence, Meta(group.id, Kind.GROUP, Place.QUEUE, group.version, group.priority))

    def shelve(self, kind: Kind, record: Waiting) -> None:
        """Puts a record into the store; the oldest one leaves where the store is full."""
        shelf = self._state.shelves[kind]
        settings = self._state.settings
        capacity = settings.replay_capacity if kind is Kind.GROUP else settings.replay_experience_capacity
        while len(shelf) >= capacity:
            self.evict(kind, next(iter(shelf)), "capacity")
        now = self._state.clock()
        entry = Entry(record.id, record.sequence, self.number(), shelf.next_slot(), record.version, now)
        shelf.put(entry, record.priority)
        self._put(entry.sequence, _meta(kind, entry, record.priority))

    def set_priority(self, entry: Entry, priority: float) -> None:
        """Changes the priority of a group in the store."""
        self._state.groups.set_priority(entry, priority)
        self._put(entry.sequence, _meta(Kind.GROUP, entry, priority))

    def evict(self, kind: Kind, entry: Entry, reason: str) -> None:
        """Takes a record out of the store for good."""
        shelf = self._state.shelves[kind]
        meta = replace(_meta(kind, entry, shelf.priority(entry)), place=Place.GONE)
        shelf.remove(entry)
        self._state.counts[f"evicted_{reason}"] += 1
        self._let_go(entry.sequence, meta)

    def dequeue(self, group: Waiting, *, shelve: bool) -> None:
        """Takes a group off the queue, into the store or for good."""
        self._state.queue.remove(group.sequence)
        if shelve:
            self.shelve(Kind.GROUP, group)
        else:
            self._let_go(group.sequence, Meta(group.id, Kind.GROUP, Place.GONE, group.version, group.priority))

    def lease_changed(self, lease: Lease) -> None:
        """Writes a lease as it stands, or that it has ended."""
        if lease.id in self._state.queue.leases:
            self.note(f"lease/{lease.id}", lease.to_json())
        else:
            self.delete_note(f"lease/{lease.id}")

    def forget_oldest(self) -> None:
        """Forgets ids of records long gone, where there are more than KNOWN_GONE; some at a time."""
        state = self._state
        if state.gone <= KNOWN_GONE:
            return

        def pick(txn: Transaction) -> tuple[list[tuple[int, str]], int]:
            picked: list[tuple[int, str]] = []
            sequence = state.trimmed_to
            for examined, (sequence, meta) in enumerate(txn.metas(state.trimmed_to)):
                if meta.place is Place.GONE and not state.kept.names(sequence):
                    picked.append((sequence, meta.id))
                if examined == _TRIMMED_AT_ONCE:
                    break
            return picked, sequence

        picked, state.trimmed_to = state.storage.read(pick)
        state.gone -= len(picked)

        def forget(txn: Transaction) -> None:
            for sequence, record_id in picked:
                txn.forget(record_id, sequence)
                txn.delete_meta(sequence)

        self._writes.append(forget)

    def _put(self, sequence: int, meta: Meta) -> None:
        self._writes.append(lambda txn: txn.put_meta(sequence, meta))

    def _let_go(self, sequence: int, meta: Meta) -> None:
        """The id stays known; the contents stay only where a snapshot names the record."""
        self._state.gone += 1
        self._put(sequence, meta)
        if not self._state.kept.names(sequence):
            self._writes.append(lambda txn: txn.delete_contents(sequence))


def _meta(kind: Kind, entry: Entry, priority: float) -> Meta:
    return Meta(entry.id, kind, Place.STORE, entry.version, priority, entry.rank, entry.slot, entry.stored_at)
