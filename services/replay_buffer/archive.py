"""Saving, restoring and dropping snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from services.http.problems import ProblemError
from services.protocol import SnapshotReply
from services.replay_buffer.shelf import Shelf
from services.replay_buffer.snapshots import Lineage, Snapshot
from services.replay_buffer.state import State
from services.replay_buffer.storage import Kind, Meta, Place, Transaction


class Archive:
    """The snapshots of a buffer."""

    def __init__(self, state: State) -> None:
        self._state = state

    def save(self, label: str) -> SnapshotReply:
        """Remembers store and queue as they are now. Leased groups count as waiting; leases are not remembered."""
        state = self._state
        snapshot = Snapshot(
            lineage=state.lineage,
            stores={kind.name.lower(): _table(shelf) for kind, shelf in state.shelves.items()},
            queue=[group.sequence for group in state.queue.groups],
            newest_version=state.newest_version,
            random_state=json.dumps(state.random.bit_generator.state),
            saved_at=state.clock(),
        )

        def write(txn: Transaction) -> None:
            self._delete(txn, label, snapshot)
            txn.put(f"snapshot/{label}", snapshot.to_json())

        state.storage.write(write)
        state.kept.drop(label)
        state.kept.add(label, snapshot)
        return SnapshotReply(label=label, groups=snapshot.groups)

    def restore(self, label: str) -> SnapshotReply:
        """Takes store and queue back to a snapshot; groups added since are unknown again, leases have ended.

        Raises:
            ProblemError: 404, there is no such snapshot.
        """
        state = self._state
        snapshot = state.storage.read(lambda txn: _read(txn, label))
        if snapshot is None:
            known = ", ".join(state.kept.labels) or "none"
            raise ProblemError(404, f"there is no snapshot {label!r}; there are: {known}")
        target = {row[0]: row for kind in Kind for row in _rows(snapshot, kind)}
        queued = set(snapshot.queue)

        def write(txn: Transaction) -> None:
            for sequence in self._live():
                if sequence not in target and sequence not in queued:
                    _end(txn, sequence, keep=state.kept.names(sequence))
            for sequence, slot, rank, priority, stored_at in target.values():
                txn.change_meta(
                    sequence, place=Place.STORE, slot=slot, rank=rank, priority=priority, stored_at=stored_at
                )
            for sequence in queued:
                txn.change_meta(sequence, place=Place.QUEUE)
            for lease_id in [lease_id for lease_id, _ in txn.notes("lease/")]:
                txn.delete(f"lease/{lease_id}")
            self._switch_lineage(txn, snapshot.lineage)
            txn.put("lineage", {"intervals": snapshot.lineage.intervals, "since": state.next_sequence})
            txn.put("newest_version", snapshot.newest_version)
            txn.put("random_state", snapshot.random_state)

        state.storage.write(write)
        state.reload()
        return SnapshotReply(label=label, groups=snapshot.groups)

    def drop(self, label: str) -> SnapshotReply:
        """Forgets a snapshot, and what was kept for it alone."""
        state = self._state
        snapshot = state.storage.read(lambda txn: _read(txn, label))
        if snapshot is None:
            return SnapshotReply(label=label, groups=0)
        state.storage.write(lambda txn: self._delete(txn, label, None))
        state.kept.drop(label)
        return SnapshotReply(label=label, groups=snapshot.groups)

    def _live(self) -> Iterable[int]:
        for shelf in self._state.shelves.values():
            yield from (entry.sequence for entry in shelf)
        yield from (group.sequence for group in self._state.queue.groups)

    def _delete(self, txn: Transaction, label: str, successor: Snapshot | None) -> None:
        """Deletes a snapshot, and the records that neither the present nor another snapshot needs."""
        state = self._state
        snapshot = _read(txn, label)
        if snapshot is None:
            return
        txn.delete(f"snapshot/{label}")
        needed = set(self._live())
        if successor is not None:
            needed.update(successor.sequences.tolist())
        for sequence in snapshot.sequences.tolist():
            if sequence not in needed and not state.kept.names(sequence, but=label):
                txn.delete_contents(sequence)
        present = state.lineage
        for sequence, _ in txn.metas(snapshot.lineage.divergence(present)):
            if sequence in snapshot.lineage and sequence not in present and not state.kept.knows(sequence, but=label):
                txn.delete_meta(sequence)

    def _switch_lineage(self, txn: Transaction, target: Lineage) -> None:
        """Makes the ids known that belong to ``target``, and no others; deletes what no lineage needs any more."""
        state = self._state
        present = state.lineage
        for sequence, meta in list(txn.metas(target.divergence(present))):
            if sequence in target:
                _know(txn, sequence, meta)
            elif sequence in present:
                txn.forget(meta.id, sequence)
                if not state.kept.knows(sequence):
                    txn.delete_meta(sequence)
                    txn.delete_contents(sequence)


def _know(txn: Transaction, sequence: int, meta: Meta) -> None:
    if meta.kind is Kind.GROUP:
        txn.know(meta.id, sequence)


def _end(txn: Transaction, sequence: int, *, keep: bool) -> None:
    meta = txn.meta(sequence)
    assert meta is not None
    txn.put_meta(sequence, replace(meta, place=Place.GONE))
    if not keep:
        txn.delete_contents(sequence)


def _read(txn: Transaction, label: str) -> Snapshot | None:
    data = txn.get(f"snapshot/{label}")
    return None if data is None else Snapshot.from_json(data)


def _table(shelf: Shelf) -> dict[str, list[int] | list[float]]:
    entries = list(shelf)
    return {
        "sequence": [entry.sequence for entry in entries],
        "slot": [entry.slot for entry in entries],
        "rank": [entry.rank for entry in entries],
        "priority": [shelf.priority(entry) for entry in entries],
        "stored_at": [entry.stored_at for entry in entries],
    }


def _rows(snapshot: Snapshot, kind: Kind) -> Iterable[tuple[int, int, int, float, float]]:
    table = snapshot.stores[kind.name.lower()]
    return zip(table["sequence"], table["slot"], table["rank"], table["priority"], table["stored_at"], strict=True)
