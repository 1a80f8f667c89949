"""Saving, restoring and dropping snapshots of store and queue."""

from __future__ import annotations

from services.http.problems import ProblemError
from services.protocol.replay import SnapshotReply
from services.replay_buffer.store import Store

_COPY_MEMBERS = """
INSERT INTO members SELECT :target, sequence, place, position, version, priority, stored_at, NULL
FROM members WHERE snapshot = :source
"""
_COPY_HISTORY = """
INSERT INTO histories SELECT :target, first, min(last, :newest) FROM histories
WHERE snapshot = :source AND first <= :newest
"""


class Snapshots:
    """The snapshots in the store's database, so that a resumed run finds what its checkpoint had."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._db = store.database

    @property
    def labels(self) -> list[str]:
        """The labels of the snapshots, sorted."""
        return [label for (label,) in self._db.execute("SELECT label FROM snapshots WHERE id != 0 ORDER BY label")]

    def save(self, label: str) -> SnapshotReply:
        """Save store and queue under a label, in place of its former snapshot. Leased groups count as waiting."""
        with self._store.transaction():
            self._delete(label)
            snapshot = self._db.execute("INSERT INTO snapshots (label) VALUES (?)", (label,)).lastrowid
            self._copy(0, snapshot)
        return SnapshotReply(label=label, groups=self._groups(label))

    def restore(self, label: str) -> SnapshotReply:
        """Take store and queue back to a snapshot. Groups added since are unknown again, and leases have ended.

        Raises:
            ProblemError: 404, there is no such snapshot.
        """
        found = self._db.execute("SELECT id FROM snapshots WHERE label = ?", (label,)).fetchone()
        if found is None:
            known = ", ".join(self.labels) or "none"
            raise ProblemError(404, f"there is no snapshot {label!r}; there are: {known}")
        with self._store.transaction():
            self._db.execute("DELETE FROM leases")
            self._db.execute("DELETE FROM members WHERE snapshot = 0")
            self._db.execute("DELETE FROM histories WHERE snapshot = 0")
            self._copy(found[0], 0)
            self._db.execute(
                "INSERT INTO histories VALUES (0, ?, 9223372036854775807)", (self._db.newest_sequence + 1,)
            )
        self._store.load()
        return SnapshotReply(label=label, groups=self._groups(label))

    def drop(self, label: str) -> SnapshotReply:
        """Drop a snapshot, and the contents that were kept for it alone. A label without a snapshot has 0 groups."""
        groups = self._groups(label)
        with self._store.transaction():
            self._delete(label)
        return SnapshotReply(label=label, groups=groups)

    def _copy(self, source: int, target: int | None) -> None:
        names = {"source": source, "target": target, "newest": self._db.newest_sequence}
        self._db.execute(_COPY_MEMBERS, names)
        self._db.execute(_COPY_HISTORY, names)

    def _delete(self, label: str) -> None:
        for (snapshot,) in self._db.execute("SELECT id FROM snapshots WHERE label = ?", (label,)).fetchall():
            self._db.execute("DELETE FROM snapshots WHERE id = ?", (snapshot,))
            self._db.execute("DELETE FROM members WHERE snapshot = ?", (snapshot,))
            self._db.execute("DELETE FROM histories WHERE snapshot = ?", (snapshot,))

    def _groups(self, label: str) -> int:
        rows = self._db.execute(
            "SELECT count(*) FROM snapshots JOIN members ON snapshot = id WHERE label = ? AND place != 'experiences'",
            (label,),
        )
        return int(rows.fetchone()[0])
