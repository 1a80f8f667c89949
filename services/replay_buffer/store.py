"""The store: groups (and experiences without tokens) to draw from, by priority, by age or all alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from services.protocol import (
    AddExperiencesReply,
    AddGroupsReply,
    FlatExperience,
    Group,
    SampleExperiencesRequest,
    SampleGroupsRequest,
    SampleStrategy,
    UpdatePrioritiesReply,
)
from services.replay_buffer.packing import unpack
from services.replay_buffer.shelf import Draw
from services.replay_buffer.state import Change, NewRecord, State
from services.replay_buffer.storage import Kind, Transaction

# An experience without a priority of its own: one of reward 0 must be drawn now and then too.
_LEAST_PRIORITY = 0.01


class Store:
    """Adds to the store and draws from it."""

    def __init__(self, state: State) -> None:
        self._state = state

    def add(self, groups: Sequence[Group], priorities: Sequence[float] | None) -> AddGroupsReply:
        """Stores the groups whose id is not known yet."""
        state = self._state
        added = 0
        with state.change() as change:
            for record in new_records(state, groups, priorities):
                change.shelve(Kind.GROUP, change.create(Kind.GROUP, record))
                added += 1
            self._evict_due(change)
            change.forget_oldest()
        state.counts["added"] += added
        state.counts["duplicates"] += len(groups) - added
        return AddGroupsReply(added=added, duplicates=len(groups) - added, size=len(state.groups))

    def add_experiences(self, experiences: Sequence[FlatExperience]) -> AddExperiencesReply:
        """Stores experiences without tokens."""
        state = self._state
        with state.change() as change:
            for experience in experiences:
                # They have no id of their own, so the same one twice is two.
                record = NewRecord(
                    f"experience-{state.next_sequence}",
                    0,
                    _priority(experience),
                    orjson.dumps(experience.model_dump()),
                )
                change.shelve(Kind.EXPERIENCE, change.create(Kind.EXPERIENCE, record))
            change.forget_oldest()
        state.counts["experiences_added"] += len(experiences)
        return AddExperiencesReply(added=len(experiences), size=len(state.experiences))

    def sample(self, request: SampleGroupsRequest) -> bytes:
        """The JSON of a SampleGroupsReply."""
        state = self._state
        if self._is_due():
            with state.change() as change:
                self._evict_due(change)
        if request.strategy is SampleStrategy.RECENCY:
            draws = state.groups.newest(
                request.batch_size, least_version=request.min_policy_version, exclude=request.exclude
            )
        else:
            draws = state.groups.draw(
                request.batch_size,
                self._random(request.seed),
                exponent=request.exponent if request.strategy is SampleStrategy.PRIORITY else 0.0,
                correction=request.correction,
                least_version=request.min_policy_version,
                exclude=request.exclude,
            )
        state.counts["sampled"] += len(draws)
        return state.storage.read(lambda txn: orjson.dumps(_sampled(txn, draws), option=orjson.OPT_SERIALIZE_NUMPY))

    def sample_experiences(self, request: SampleExperiencesRequest) -> bytes:
        """The JSON of a SampleExperiencesReply."""
        draws = self._state.experiences.draw(
            request.batch_size, self._random(request.seed), exponent=1.0 if request.prioritized else 0.0
        )

        def read(txn: Transaction) -> bytes:
            contents = [txn.contents(draw.entry.sequence) for draw in draws]
            return b'{"experiences":[' + b",".join(bytes(c) for c in contents if c is not None) + b"]}"

        return self._state.storage.read(read)

    def update_priorities(self, priorities: Mapping[str, float]) -> UpdatePrioritiesReply:
        """Sets the priorities of groups in the store."""
        state = self._state
        updated = 0
        with state.change() as change:
            for group_id, priority in priorities.items():
                entry = state.groups.get(group_id)
                if entry is not None:
                    change.set_priority(entry, priority)
                    updated += 1
        return UpdatePrioritiesReply(updated=updated, unknown=len(priorities) - updated)

    def get(self, group_id: str) -> bytes | None:
        """The JSON of a group in the store or the queue."""

        def read(txn: Transaction) -> bytes | None:
            sequence = txn.sequence_of(group_id)
            if sequence is None or not (group_id in self._state.groups or self._state.queue.get(sequence)):
                return None
            contents = txn.contents(sequence)
            return None if contents is None else orjson.dumps(unpack(contents), option=orjson.OPT_SERIALIZE_NUMPY)

        return self._state.storage.read(read)

    def _random(self, seed: int | None) -> np.random.Generator:
        return self._state.random if seed is None else np.random.Generator(np.random.PCG64(seed))

    def _stale_below(self) -> int:
        """The policy version below which groups are too stale to keep."""
        most, newest = self._state.settings.replay_evict_staleness, self._state.newest_version
        return 0 if most is None or newest is None else newest - most

    def _oldest_allowed(self) -> float:
        age = self._state.settings.replay_max_age_seconds
        return float("-inf") if age is None else self._state.clock() - age

    def _is_due(self) -> bool:
        shelf = self._state.groups
        oldest = next(iter(shelf), None)
        if oldest is None:
            return False
        return oldest.stored_at < self._oldest_allowed() or bool(shelf.older_than_version(self._stale_below()))

    def _evict_due(self, change: Change) -> None:
        shelf = self._state.groups
        for entry in shelf.older_than_version(self._stale_below()):
            change.evict(Kind.GROUP, entry, "staleness")
        allowed = self._oldest_allowed()
        while (oldest := next(iter(shelf), None)) is not None and oldest.stored_at < allowed:
            change.evict(Kind.GROUP, oldest, "age")


def new_records(state: State, groups: Sequence[Group], priorities: Sequence[float] | None) -> list[NewRecord]:
    """The groups whose id is not known yet, each once, as records."""
    fresh: dict[str, NewRecord] = {}

    def pick(txn: Transaction) -> None:
        for number, group in enumerate(groups):
            if group.group_id not in fresh and txn.sequence_of(group.group_id) is None:
                fresh[group.group_id] = NewRecord.of(group, None if priorities is None else priorities[number])

    state.storage.read(pick)
    return list(fresh.values())


def _sampled(txn: Transaction, draws: Sequence[Draw]) -> dict[str, Any]:
    groups = []
    for draw in draws:
        contents = txn.contents(draw.entry.sequence)
        assert contents is not None, f"no contents of {draw.entry}"
        groups.append(
            {
                "group": unpack(contents),
                "priority": draw.priority,
                "probability": draw.probability,
                "weight": draw.weight,
            }
        )
    return {"groups": groups}


def _priority(experience: FlatExperience) -> float:
    """The experience's own ``priority`` where it has one, else how much its reward says."""
    given = (experience.model_extra or {}).get("priority")
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given <= 1e12:
        return float(given)
    return min(abs(experience.reward) + _LEAST_PRIORITY, 1e12)
