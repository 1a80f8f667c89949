"""The store: adds groups (and experiences without tokens), samples them, and saves and restores its contents."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import orjson

from services.http.problems import ProblemError
from services.protocol import replay as wire
from services.protocol.groups import Group, pack
from services.replay_buffer.database import Database
from services.replay_buffer.settings import ReplaySettings

# Only clients of the stock example add experiences without tokens, which are small: as many as groups by default.
CAPACITY = 100_000
"""Groups kept for replay, beyond which the oldest are evicted: more steps' groups than REPLAY_MAX_STALENESS reaches."""
EXPERIENCE_CAPACITY = 100_000

# Priority of an experience whose reward is 0, which must be drawn now and then, too.
_LEAST_PRIORITY = 0.01
_HIGHEST_PRIORITY = 1e12

_FIND = "SELECT place, sequence, position FROM known CROSS JOIN members USING (sequence) WHERE group_id = ?"
_KEEP = """
INSERT INTO members VALUES (?, ?, ?, ?, ?, ?, NULL)
ON CONFLICT DO UPDATE SET place = excluded.place, position = excluded.position, lease = NULL
"""
_LAST_SEQUENCE = 2**63 - 1

Members = list[tuple[int, str, int, int, float, str]]
"""The members of a snapshot: sequence number, place, position, version, priority, source."""


class Record(NamedTuple):
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
        [(ranges,)] = self.database.execute("SELECT ranges FROM snapshots WHERE label = ''")
        self._ranges: list[list[int]] = orjson.loads(ranges)
        """The ranges of sequence numbers within which an id is known."""
        snapshots = self.database.execute("SELECT label, members FROM snapshots WHERE label != '' ORDER BY label")
        self._held = {label: {row[0] for row in orjson.loads(members)} for label, members in snapshots}
        """The sequence numbers of each snapshot's members, by its label."""
        self.groups, self.experiences = self._load_index("store"), self._load_index("experiences")

    def _load_index(self, place: str) -> PriorityIndex:
        rows = self.database.execute(
            "SELECT position, sequence, version, source, priority FROM members WHERE place = ? ORDER BY position",
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
        for place, group in enumerate(groups):
            earlier = self.database.execute("SELECT sequence FROM known WHERE group_id = ?", (group.group_id,))
            if not any(first <= number <= last for (number,) in earlier for first, last in self._ranges):
                sequence = self._insert(pack(group))
                self.database.execute("INSERT INTO known VALUES (?, ?)", (sequence, group.group_id))
                source = group.prompt.source
                priority = highest[source] if priorities is None else priorities[place]
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
        draws = self.groups.draw(
            request.batch_size,
            np.random.default_rng(request.seed),
            exponent=request.exponent,
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
                    self.database.execute("UPDATE members SET priority = ? WHERE sequence = ?", (priority, sequence))
                    updated += 1
        return wire.UpdatePrioritiesReply(updated=updated, unknown=len(priorities) - updated)

    def delete(self, sequences: Iterable[int]) -> None:
        """Delete records from the database, and their contents unless a snapshot has them."""
        gone = list(sequences)
        self.database.executemany("DELETE FROM members WHERE sequence = ?", [(sequence,) for sequence in gone])
        self._delete_contents(gone)

    def _delete_contents(self, sequences: Iterable[int]) -> None:
        """Delete the contents of records that are no members any more, except those that a snapshot has."""
        unheld = [(number,) for number in sequences if not any(number in held for held in self._held.values())]
        self.database.executemany("DELETE FROM contents WHERE sequence = ?", unheld)

    @property
    def snapshots(self) -> list[str]:
        """The labels of the snapshots, sorted."""
        return sorted(self._held)

    def save(self, label: str) -> wire.SnapshotReply:
        """Save store and queue under a label, in place of its former snapshot. Leased groups count as waiting."""
        newest = self.database.newest_sequence
        ranges = [[first, min(last, newest)] for first, last in self._ranges if first <= newest]
        members = self.database.execute("SELECT sequence, place, position, version, priority, source FROM members")
        rows: Members = members.fetchall()
        with self.transaction():
            self._forget(label)
            self._held[label] = {row[0] for row in rows}
            snapshot = (label, orjson.dumps(ranges), orjson.dumps(rows))
            self.database.execute("INSERT INTO snapshots VALUES (?, ?, ?)", snapshot)
        return wire.SnapshotReply(label=label, groups=_groups(rows))

    def restore(self, label: str) -> wire.SnapshotReply:
        """Take store and queue back to a snapshot. Groups added since are unknown again, and leases have ended.

        Raises:
            ProblemError: 404, the label has no snapshot.
        """
        if label not in self._held:
            raise ProblemError(404, f"there is no snapshot {label!r}; there are: {', '.join(self.snapshots) or 'none'}")
        ranges, rows = self._read(label)
        with self.transaction():
            self.database.execute("DELETE FROM leases")
            gone = self.database.execute("DELETE FROM members RETURNING sequence").fetchall()
            self.database.executemany(_KEEP, rows)
            self._delete_contents(number for (number,) in gone)
            ranges.append([self.database.newest_sequence + 1, _LAST_SEQUENCE])
            self.database.execute("UPDATE snapshots SET ranges = ? WHERE label = ''", (orjson.dumps(ranges),))
        self.load()
        return wire.SnapshotReply(label=label, groups=_groups(rows))

    def drop(self, label: str) -> wire.SnapshotReply:
        """Drop a snapshot, and the contents that were kept for it alone. A label without a snapshot has 0 groups."""
        groups = _groups(self._read(label)[1]) if label in self._held else 0
        with self.transaction():
            self._forget(label)
        return wire.SnapshotReply(label=label, groups=groups)

    def _read(self, label: str) -> tuple[list[list[int]], Members]:
        """Return the ranges and the members of a snapshot."""
        query = "SELECT ranges, members FROM snapshots WHERE label = ?"
        ranges, members = self.database.execute(query, (label,)).fetchone()
        return orjson.loads(ranges), orjson.loads(members)

    def _forget(self, label: str) -> None:
        self.database.execute("DELETE FROM snapshots WHERE label = ?", (label,))
        present = {number for (number,) in self.database.execute("SELECT sequence FROM members")}
        self._delete_contents(self._held.pop(label, set()) - present)

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
        rows = [
            (r.sequence, place, index.add(r.sequence, r.version, r.priority, self._number(r.source)), *r[1:])
            for r in records
        ]
        self.database.executemany(_KEEP, rows)
        if len(index) > capacity:
            evicted = index.remove_oldest(len(index) - capacity)
            self.delete(evicted)
            self.counts["evicted"] += len(evicted)


def _groups(members: Members) -> int:
    return sum(place != "experiences" for _, place, *_ in members)


def _priority(experience: wire.FlatExperience) -> float:
    """Return the experience's own ``priority`` if it has a valid one, else the size of its reward."""
    priority = (experience.model_extra or {}).get("priority")
    if isinstance(priority, int | float) and not isinstance(priority, bool) and 0 <= priority <= _HIGHEST_PRIORITY:
        return float(priority)
    return min(abs(experience.reward) + _LEAST_PRIORITY, _HIGHEST_PRIORITY)


# --- the index --------------------------------------------------------------------------------------------------------

Rows = np.ndarray[Any, np.dtype[np.void]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Numbers = np.ndarray[Any, np.dtype[np.float64]]

_INTEGERS = ("position", "sequence", "version", "source")
_ROW = np.dtype([*((name, np.int64) for name in _INTEGERS), ("priority", np.float64)])
_LEAST_ROWS = 1024


class Draw(NamedTuple):
    """A drawn record: its priority, the probability of drawing it first, and its importance weight."""

    sequence: int
    priority: float
    probability: float
    weight: float


class PriorityIndex:
    """Records in order of arrival, one row each: position, sequence number, policy version, source, priority.

    ``position`` is the order of arrival and names a record. Records leave in this order, too. A draw depends on the
    records and the seed alone, not on how the index came to hold them, so that a restarted buffer draws the same. A
    ``source`` is a number of the caller's; methods that take one regard the records of that source alone.
    """

    def __init__(self, rows: Sequence[tuple[int, int, int, int, float]] = ()) -> None:
        """Fill the index with rows (position, sequence, version, source, priority), sorted by position."""
        self._rows = np.array(list(rows), _ROW)
        self._first, self._end = 0, len(rows)

    def __len__(self) -> int:
        """Return the number of records."""
        return self._end - self._first

    @property
    def _records(self) -> Rows:
        return self._rows[self._first : self._end]

    def add(self, sequence: int, version: int, priority: float, source: int = 0) -> int:
        """Add a record at the end and return its position."""
        kept = self._records
        if self._end == len(self._rows):
            self._rows = np.zeros(max(_LEAST_ROWS, 2 * len(kept)), _ROW)
            self._rows[: len(kept)] = kept
            self._first, self._end = 0, len(kept)
        position = int(kept["position"][-1]) + 1 if len(kept) else 1
        self._rows[self._end] = (position, sequence, version, source, priority)
        self._end += 1
        return position

    def remove_oldest(self, count: int) -> list[int]:
        """Remove the ``count`` records that came first and return their sequence numbers."""
        sequences: list[int] = self._records["sequence"][:count].tolist()
        self._first += len(sequences)
        return sequences

    def set_priority(self, position: int, priority: float) -> None:
        """Change the priority of the record at ``position``."""
        self._records["priority"][self._row_of(position)] = priority

    def highest_priority(self, source: int = 0) -> float:
        """Return the highest priority of a source's records, 1 without any."""
        priorities = self._records["priority"][self._records["source"] == source]
        return float(priorities.max()) if len(priorities) else 1.0

    def newest_version(self) -> int | None:
        """Return the newest policy version in the index, None in an empty one."""
        return int(self._records["version"].max()) if len(self) else None

    def draw(
        self,
        count: int,
        random: np.random.Generator,
        *,
        exponent: float,
        correction: float = 0.0,
        least_version: int = 0,
        exclude: Iterable[int] = (),
        source: int | None = None,
    ) -> list[Draw]:
        """Draw without replacement, with chances proportional to priority ** exponent (arXiv:1511.05952, eq. 1).

        The draw is systematic (Madow 1949): records are lined up in random order, each as long as the expected number
        of times that it is drawn, at most 1, and drawn where points at equal distances fall on them. So the chance of
        a record to be in the draw is exactly its length P, and ``probability`` is P / count. Its ``weight`` is
        (N P / count) ** -correction (section 3.4), divided by the expected value of that over the records that can be
        drawn, whose number is N. With ``correction`` 1 the weighted sum over a draw is therefore an unbiased estimate
        of ``count`` times the mean over these records, up to the cap of P at 1.

        Records qualify if they are at least of ``least_version``, their position is not in ``exclude``, and they are
        of ``source``, if one is given.
        """
        powers = self._records["priority"] ** exponent * self._qualifying(least_version, exclude, source)
        rows = random.permutation(np.flatnonzero(powers))
        count = min(count, len(rows))
        if not count:
            return []
        chances = _capped(powers[rows], count)
        points = random.random() + np.arange(count)
        # Rounding can put a point at the very end of the sums.
        places = np.minimum(np.searchsorted(np.cumsum(chances), points, side="right"), len(rows) - 1)
        factors = (len(rows) * chances / count) ** -correction
        factors /= (factors * chances).sum() / count
        drawn = self._records[rows[places]]
        columns = (drawn["sequence"], drawn["priority"], chances[places] / count, factors[places])
        return [Draw(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]

    def _qualifying(self, least_version: int, exclude: Iterable[int], source: int | None) -> Mask:
        mask: Mask = self._records["version"] >= least_version
        if source is not None:
            mask &= self._records["source"] == source
        mask[[self._row_of(position) for position in exclude]] = False
        return mask

    def _row_of(self, position: int) -> int:
        return int(np.searchsorted(self._records["position"], position))


def _capped(powers: Numbers, total: int) -> Numbers:
    """Return numbers proportional to ``powers`` that add up to ``total``, except that none is above 1."""
    chances: Numbers = powers * (total / powers.sum())
    while (chances > 1).any():
        full = chances >= 1
        rest = powers[~full]
        chances[full] = 1.0
        chances[~full] = rest * ((total - full.sum()) / rest.sum()) if len(rest) else 0.0
    return chances
