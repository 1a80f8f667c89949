"""The store: adds groups (and experiences without tokens) and samples them by priority, by age or uniformly."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass

import numpy as np
import orjson

from services.http.problems import ProblemError
from services.protocol import replay as wire
from services.protocol.groups import Group, pack
from services.replay_buffer.database import Database
from services.replay_buffer.priority_index import PriorityIndex
from services.replay_buffer.settings import ReplaySettings

# Only clients of the stock example add experiences without tokens, which are small: as many as groups by default.
CAPACITY = 100_000
"""Groups kept for replay, beyond which the oldest are evicted: more steps' groups than REPLAY_MAX_STALENESS reaches."""
EXPERIENCE_CAPACITY = 100_000

# Priority of an experience whose reward is 0, which must be drawn now and then, too.
_LEAST_PRIORITY = 0.01
_HIGHEST_PRIORITY = 1e12

_FIND = """
SELECT place, sequence, position FROM known CROSS JOIN members USING (sequence) WHERE group_id = ? AND snapshot = 0
"""
_IS_KNOWN = """
SELECT 1 FROM known JOIN histories ON sequence BETWEEN first AND last WHERE group_id = ? AND snapshot = 0
"""
_KEEP = """
INSERT INTO members (snapshot, sequence, place, position, version, priority, source, stored_at)
VALUES (0, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET place = excluded.place, position = excluded.position, stored_at = excluded.stored_at,
    lease = NULL
"""


@dataclass(frozen=True)
class Record:
    """A group, or an experience without tokens, whose contents are in the database."""

    sequence: int
    version: int
    priority: float
    source: str = ""


class Store:
    """The records to sample from, in the database, with a priority index of groups and one of experiences.

    ``clock`` gives Unix seconds. ``counts`` has what happened since the start, by name.
    """

    def __init__(self, settings: ReplaySettings, *, clock: Callable[[], float] = time.time) -> None:
        """Open the database and load the indices.

        Raises:
            ConfigurationError: the directory cannot be used.
            DependencyLostError: another process uses it.
        """
        self.settings = settings
        self.clock = clock
        self.counts: Counter[str] = Counter()
        self.database = Database.open(settings.directory)
        self.load()

    def load(self) -> None:
        """Read everything in memory anew from the database."""
        self._numbers: dict[str, int] = {"": 0}
        """The number of each source in the indices."""
        self.groups, self.experiences = self._load_index("store"), self._load_index("experiences")

    def _load_index(self, place: str) -> PriorityIndex:
        rows = self.database.execute(
            "SELECT position, sequence, version, source, priority FROM members WHERE snapshot = 0 AND place = ? "
            "ORDER BY position",
            (place,),
        )
        return PriorityIndex([(*numbers, self._number(source), priority) for *numbers, source, priority in rows])

    def _number(self, source: str) -> int:
        return self._numbers.setdefault(source, len(self._numbers))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep what the block changes, on disk and in memory, or nothing of it if the block raises."""
        try:
            with self.database.transaction():
                yield
        except BaseException:
            self.load()
            raise

    def add(self, groups: Sequence[Group], priorities: Sequence[float] | None) -> wire.AddGroupsReply:
        """Store the groups whose id is not known yet; without priorities they get the highest in the store."""
        with self.transaction():
            added = self.insert_new(groups, priorities)
            self.keep(added)
        self.counts["added"] += len(added)
        self.counts["duplicates"] += len(groups) - len(added)
        return wire.AddGroupsReply(added=len(added), duplicates=len(groups) - len(added), size=len(self.groups))

    def insert_new(self, groups: Sequence[Group], priorities: Sequence[float] | None) -> list[Record]:
        """Write the contents of groups whose id is not known yet. The caller gives them a place."""
        sources = {group.prompt.source for group in groups} if priorities is None else ()
        highest = {source: self.groups.highest_priority(self._number(source)) for source in sources}
        added: list[Record] = []
        for number, group in enumerate(groups):
            if self.database.execute(_IS_KNOWN, (group.group_id,)).fetchone() is None:
                sequence = self._insert(pack(group))
                self.database.execute("INSERT INTO known VALUES (?, ?)", (sequence, group.group_id))
                source = group.prompt.source
                priority = highest[source] if priorities is None else priorities[number]
                added.append(Record(sequence, group.policy_version, priority, source))
        return added

    def keep(self, records: Iterable[Record]) -> None:
        """Put groups into the store, from the queue or new. The oldest groups leave where the store is full."""
        self._append("store", self.groups, records, CAPACITY)

    def add_experiences(self, experiences: Sequence[wire.FlatExperience]) -> wire.AddExperiencesReply:
        """Store experiences without tokens. They have no id, so the same experience twice is two."""
        with self.transaction():
            records = [Record(self._insert(orjson.dumps(e.model_dump())), 0, _priority(e)) for e in experiences]
            self._append("experiences", self.experiences, records, EXPERIENCE_CAPACITY)
        self.counts["experiences_added"] += len(experiences)
        return wire.AddExperiencesReply(added=len(experiences), size=len(self.experiences))

    def sample(self, request: wire.SampleGroupsRequest) -> bytes:
        """Return a SampleGroupsReply as framed bytes."""
        rows = (self._find(group_id) for group_id in request.exclude)
        exclude = [position for place, _, position in filter(None, rows) if place == "store"]
        source = self._number(request.source) if request.source else None
        if request.strategy is wire.SampleStrategy.RECENCY:
            draws = self.groups.newest(
                request.batch_size, least_version=request.min_policy_version, exclude=exclude, source=source
            )
        else:
            draws = self.groups.draw(
                request.batch_size,
                np.random.default_rng(request.seed),
                exponent=request.exponent if request.strategy is wire.SampleStrategy.PRIORITY else 0.0,
                correction=request.correction,
                least_version=request.min_policy_version,
                exclude=exclude,
                source=source,
            )
        self.counts["sampled"] += len(draws)
        weights = [{"priority": d.priority, "probability": d.probability, "weight": d.weight} for d in draws]
        return wire.framed({"draws": weights}, self.database.groups(draw.sequence for draw in draws))

    def sample_experiences(self, request: wire.SampleExperiencesRequest) -> bytes:
        """Return the JSON of a SampleExperiencesReply."""
        exponent = 1.0 if request.prioritized else 0.0
        draws = self.experiences.draw(request.batch_size, np.random.default_rng(request.seed), exponent=exponent)
        return b'{"experiences":[' + b",".join(self.database.contents(draw.sequence for draw in draws)) + b"]}"

    def update_priorities(self, priorities: Mapping[str, float]) -> wire.UpdatePrioritiesReply:
        """Set the priorities of groups in the store."""
        updated = 0
        with self.transaction():
            for group_id, priority in priorities.items():
                row = self._find(group_id)
                if row is not None and row[0] == "store":
                    _, sequence, position = row
                    self.groups.set_priority(position, priority)
                    self.database.execute(
                        "UPDATE members SET priority = ? WHERE snapshot = 0 AND sequence = ?", (priority, sequence)
                    )
                    updated += 1
        return wire.UpdatePrioritiesReply(updated=updated, unknown=len(priorities) - updated)

    def delete(self, sequences: Iterable[int]) -> None:
        """Delete records from the database, and their contents unless a snapshot has them."""
        self.database.executemany(
            "DELETE FROM members WHERE snapshot = 0 AND sequence = ?", [(sequence,) for sequence in sequences]
        )

    def _find(self, group_id: str) -> tuple[str, int, int] | None:
        """Return place, sequence number and position of a group in the store or the queue."""
        row: tuple[str, int, int] | None = self.database.execute(_FIND, (group_id,)).fetchone()
        return row

    def _insert(self, data: bytes) -> int:
        """Write contents and return their sequence number."""
        sequence = self.database.execute("INSERT INTO contents (data) VALUES (?)", (data,)).lastrowid
        assert sequence is not None
        return sequence

    def _append(self, place: str, index: PriorityIndex, records: Iterable[Record], capacity: int) -> None:
        now, number = self.clock(), self._number
        rows = [
            (r.sequence, place, index.add(r.sequence, r.version, r.priority, number(r.source)), *astuple(r)[1:], now)
            for r in records
        ]
        self.database.executemany(_KEEP, rows)
        if len(index) > capacity:
            evicted = index.remove_oldest(len(index) - capacity)
            self.delete(evicted)
            self.counts["evicted"] += len(evicted)


def _priority(experience: wire.FlatExperience) -> float:
    """Return the experience's own ``priority`` if it has a valid one, else the size of its reward."""
    priority = (experience.model_extra or {}).get("priority")
    if isinstance(priority, int | float) and not isinstance(priority, bool) and 0 <= priority <= _HIGHEST_PRIORITY:
        return float(priority)
    return min(abs(experience.reward) + _LEAST_PRIORITY, _HIGHEST_PRIORITY)


_COPY_MEMBERS = """
INSERT INTO members SELECT :target, sequence, place, position, version, priority, stored_at, NULL, source
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

    def save(self, label: str) -> wire.SnapshotReply:
        """Save store and queue under a label, in place of its former snapshot. Leased groups count as waiting."""
        with self._store.transaction():
            self._delete(label)
            snapshot = self._db.execute("INSERT INTO snapshots (label) VALUES (?)", (label,)).lastrowid
            self._copy(0, snapshot)
        return wire.SnapshotReply(label=label, groups=self._groups(label))

    def restore(self, label: str) -> wire.SnapshotReply:
        """Take store and queue back to a snapshot. Groups added since are unknown again, and leases have ended.

        Raises:
            ProblemError: 404, the label has no snapshot.
        """
        snapshot = self._db.execute("SELECT id FROM snapshots WHERE label = ?", (label,)).fetchone()
        if snapshot is None:
            labels = ", ".join(self.labels) or "none"
            raise ProblemError(404, f"there is no snapshot {label!r}; there are: {labels}")
        with self._store.transaction():
            self._db.execute("DELETE FROM leases")
            self._db.execute("DELETE FROM members WHERE snapshot = 0")
            self._db.execute("DELETE FROM histories WHERE snapshot = 0")
            self._copy(snapshot[0], 0)
            self._db.execute(
                "INSERT INTO histories VALUES (0, ?, 9223372036854775807)", (self._db.newest_sequence + 1,)
            )
        self._store.load()
        return wire.SnapshotReply(label=label, groups=self._groups(label))

    def drop(self, label: str) -> wire.SnapshotReply:
        """Drop a snapshot, and the contents that were kept for it alone. A label without a snapshot has 0 groups."""
        groups = self._groups(label)
        with self._store.transaction():
            self._delete(label)
        return wire.SnapshotReply(label=label, groups=groups)

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
