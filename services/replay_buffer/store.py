"""The store: adds groups (and experiences without tokens) and samples them by priority, by age or uniformly."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import orjson

from services.protocol.groups import Group
from services.protocol.replay import (
    AddExperiencesReply,
    AddGroupsReply,
    FlatExperience,
    SampleExperiencesRequest,
    SampleGroupsRequest,
    SampleStrategy,
    UpdatePrioritiesReply,
)
from services.replay_buffer.database import Database
from services.replay_buffer.packing import pack, unpack
from services.replay_buffer.priorities import Indices, PriorityIndex
from services.replay_buffer.settings import ReplaySettings

# Ids of groups that left stay known for so many further groups: longer than a producer goes on repeating a request.
KNOWN_GONE = 1_000_000

# Only clients of the stock example add experiences without tokens, which are small: as many as groups by default.
EXPERIENCE_CAPACITY = 100_000

# Seeds the draws of clients that give no seed; the trainer gives one.
_SEED = 0

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
INSERT INTO members (snapshot, sequence, place, position, version, priority, stored_at) VALUES (0, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET place = excluded.place, position = excluded.position, stored_at = excluded.stored_at,
    lease = NULL
"""
_FORGET = """
DELETE FROM known WHERE sequence >= ? AND sequence < ? AND NOT EXISTS (
    SELECT 1 FROM snapshots CROSS JOIN members ON snapshot = snapshots.id WHERE members.sequence = known.sequence
)
"""


@dataclass(frozen=True)
class Record:
    """A group, or an experience without tokens, whose contents are in the database."""

    sequence: int
    version: int
    priority: float


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
        self.database = Database(
            settings.directory, fsync=settings.replay_fsync, max_bytes=int(settings.replay_max_gb * 2**30)
        )
        self.load()

    def load(self) -> None:
        """Read everything in memory anew from the database."""
        self.groups, self.experiences = self._load_index("store"), self._load_index("experiences")
        self.newest_version: int | None
        self.newest_version, random_state = self.database.execute(
            "SELECT newest_version, random_state FROM snapshots WHERE id = 0"
        ).fetchone()
        self.random = np.random.Generator(np.random.PCG64(_SEED))
        if random_state is not None:
            self.random.bit_generator.state = json.loads(random_state)
        self._forgotten_below = 0

    def _load_index(self, place: str) -> PriorityIndex:
        rows = self.database.execute(
            "SELECT position, sequence, version, priority, stored_at FROM members WHERE snapshot = 0 AND place = ? "
            "ORDER BY position",
            (place,),
        )
        return PriorityIndex(rows.fetchall())

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep what the block changes, on disk and in memory, or nothing of it if the block raises."""
        try:
            with self.database.transaction():
                yield
        except BaseException:
            self.load()
            raise

    def add(self, groups: Sequence[Group], priorities: Sequence[float] | None) -> AddGroupsReply:
        """Store the groups whose id is not known yet; without priorities they get the highest in the store."""
        with self.transaction():
            added = self.insert_new(groups, priorities)
            self.keep(added)
            self._evict_outdated()
        self.counts["added"] += len(added)
        self.counts["duplicates"] += len(groups) - len(added)
        return AddGroupsReply(added=len(added), duplicates=len(groups) - len(added), size=len(self.groups))

    def insert_new(self, groups: Sequence[Group], priorities: Sequence[float] | None) -> list[Record]:
        """Write the contents of groups whose id is not known yet. The caller gives them a place."""
        highest = self.groups.highest_priority()
        added: list[Record] = []
        for number, group in enumerate(groups):
            if self.database.execute(_IS_KNOWN, (group.group_id,)).fetchone() is None:
                sequence = self._insert(pack(group))
                self.database.execute("INSERT INTO known VALUES (?, ?)", (sequence, group.group_id))
                priority = highest if priorities is None else priorities[number]
                added.append(Record(sequence, group.policy_version, priority))
        if added:
            self._saw_version(max(record.version for record in added))
            self._forget_oldest(added[-1].sequence)
        return added

    def keep(self, records: Iterable[Record]) -> None:
        """Put groups into the store, from the queue or new. The oldest groups leave where the store is full."""
        self._append("store", self.groups, records, self.settings.replay_capacity)

    def add_experiences(self, experiences: Sequence[FlatExperience]) -> AddExperiencesReply:
        """Store experiences without tokens. They have no id, so the same experience twice is two."""
        with self.transaction():
            records = [Record(self._insert(orjson.dumps(e.model_dump())), 0, _priority(e)) for e in experiences]
            self._append("experiences", self.experiences, records, EXPERIENCE_CAPACITY)
        self.counts["experiences_added"] += len(experiences)
        return AddExperiencesReply(added=len(experiences), size=len(self.experiences))

    def sample(self, request: SampleGroupsRequest) -> bytes:
        """Return the JSON of a SampleGroupsReply."""
        if any(len(outdated) for _, outdated in self._outdated()):
            with self.transaction():
                self._evict_outdated()
        found = (self._find(group_id) for group_id in request.exclude)
        exclude = [position for place, _, position in filter(None, found) if place == "store"]
        if request.strategy is SampleStrategy.RECENCY:
            draws = self.groups.newest(request.batch_size, least_version=request.min_policy_version, exclude=exclude)
        else:
            draws = self.groups.draw(
                request.batch_size,
                self._random(request.seed),
                exponent=request.exponent if request.strategy is SampleStrategy.PRIORITY else 0.0,
                correction=request.correction,
                least_version=request.min_policy_version,
                exclude=exclude,
            )
        self.counts["sampled"] += len(draws)
        contents = self.database.contents(draw.sequence for draw in draws)
        groups = [
            {"group": unpack(data), "priority": draw.priority, "probability": draw.probability, "weight": draw.weight}
            for draw, data in zip(draws, contents, strict=True)
        ]
        return orjson.dumps({"groups": groups}, option=orjson.OPT_SERIALIZE_NUMPY)

    def sample_experiences(self, request: SampleExperiencesRequest) -> bytes:
        """Return the JSON of a SampleExperiencesReply."""
        exponent = 1.0 if request.prioritized else 0.0
        draws = self.experiences.draw(request.batch_size, self._random(request.seed), exponent=exponent)
        return b'{"experiences":[' + b",".join(self.database.contents(draw.sequence for draw in draws)) + b"]}"

    def update_priorities(self, priorities: Mapping[str, float]) -> UpdatePrioritiesReply:
        """Set the priorities of groups in the store."""
        updated = 0
        with self.transaction():
            for group_id, priority in priorities.items():
                found = self._find(group_id)
                if found is not None and found[0] == "store":
                    _, sequence, position = found
                    self.groups.set_priority(position, priority)
                    self.database.execute(
                        "UPDATE members SET priority = ? WHERE snapshot = 0 AND sequence = ?", (priority, sequence)
                    )
                    updated += 1
        return UpdatePrioritiesReply(updated=updated, unknown=len(priorities) - updated)

    def get(self, group_id: str) -> bytes | None:
        """Return the JSON of a group in the store or the queue, None for another id."""
        found = self._find(group_id)
        if found is None:
            return None
        (data,) = self.database.contents([found[1]])
        return orjson.dumps(unpack(data), option=orjson.OPT_SERIALIZE_NUMPY)

    def _find(self, group_id: str) -> tuple[str, int, int] | None:
        """Return place, sequence number and position of a group in the store or the queue."""
        found: tuple[str, int, int] | None = self.database.execute(_FIND, (group_id,)).fetchone()
        return found

    def _random(self, seed: int | None) -> np.random.Generator:
        return self.random if seed is None else np.random.Generator(np.random.PCG64(seed))

    def _insert(self, data: bytes) -> int:
        """Write contents and return their sequence number."""
        sequence = self.database.execute("INSERT INTO contents (data) VALUES (?)", (data,)).lastrowid
        assert sequence is not None
        return sequence

    def _append(self, place: str, index: PriorityIndex, records: Iterable[Record], capacity: int) -> None:
        now = self.clock()
        rows = [
            (r.sequence, place, index.add(r.sequence, r.version, r.priority, now), r.version, r.priority, now)
            for r in records
        ]
        self.database.executemany(_KEEP, rows)
        if len(index) > capacity:
            self._evict(index, index.oldest(len(index) - capacity), "capacity")

    def _saw_version(self, version: int) -> None:
        if self.newest_version is None or version > self.newest_version:
            self.newest_version = version
            self.database.execute("UPDATE snapshots SET newest_version = ? WHERE id = 0", (version,))

    def _outdated(self) -> Iterator[tuple[str, Indices]]:
        """Yield the rows of groups to evict for their policy version or age, by reason."""
        staleness, age = self.settings.replay_evict_staleness, self.settings.replay_max_age_seconds
        if staleness is not None and self.newest_version is not None:
            yield "staleness", self.groups.with_version_below(self.newest_version - staleness)
        if age is not None:
            yield "age", self.groups.stored_before(self.clock() - age)

    def _evict_outdated(self) -> None:
        for reason, outdated in self._outdated():
            self._evict(self.groups, outdated, reason)

    def _evict(self, index: PriorityIndex, indices: Indices, reason: str) -> None:
        sequences = index.remove(indices)
        self.database.executemany(
            "DELETE FROM members WHERE snapshot = 0 AND sequence = ?", [(sequence,) for sequence in sequences]
        )
        self.counts[f"evicted_{reason}"] += len(sequences)

    def _forget_oldest(self, newest: int) -> None:
        """Forget ids of groups that no snapshot has and that left longest ago."""
        below = newest - KNOWN_GONE - len(self.groups)
        if below > self._forgotten_below:
            self.database.execute(_FORGET, (self._forgotten_below, below))
            self._forgotten_below = below


def _priority(experience: FlatExperience) -> float:
    """Return the experience's own ``priority`` if it has a valid one, else the size of its reward."""
    given = (experience.model_extra or {}).get("priority")
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given <= _HIGHEST_PRIORITY:
        return float(given)
    return min(abs(experience.reward) + _LEAST_PRIORITY, _HIGHEST_PRIORITY)
