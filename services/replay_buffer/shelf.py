"""What the buffer knows of the records that it draws from: all but their contents, in memory, by slot.

A new record takes the lowest free slot, so the slots (and with them what a seed draws) follow from what is on the
shelf alone.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from services.replay_buffer.sumtree import SumTree

_KEPT_TREES = 4
_EMPTY = -1.0
_LEAST_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """A record on the shelf. ``sequence`` names its contents, ``rank`` orders by the time of arrival."""

    id: str
    sequence: int
    rank: int
    slot: int
    version: int
    stored_at: float


@dataclass(frozen=True)
class Draw:
    """A drawn record: its priority, the chance of its being drawn first, and its importance weight."""

    entry: Entry
    priority: float
    probability: float
    weight: float


class Shelf:
    """An index of records by id, age, policy version and priority."""

    def __init__(self, records: Iterable[tuple[Entry, float]] = ()) -> None:
        """Fills the shelf with entries and their priorities, oldest first."""
        self._by_id: dict[str, Entry] = {}
        self._by_rank: OrderedDict[int, Entry] = OrderedDict()
        self._version_counts: Counter[int] = Counter()
        self._trees: OrderedDict[float, SumTree] = OrderedDict()
        known = list(records)
        size = max((entry.slot + 1 for entry, _ in known), default=0)
        self._by_slot: list[Entry | None] = [None] * size
        self._priorities = np.full(max(_LEAST_SIZE, 1 << (size - 1).bit_length() if size else 0), _EMPTY)
        self._versions = np.zeros(len(self._priorities), np.int64)
        for entry, priority in known:
            self._place(entry, priority)
        self._free = [slot for slot, entry in enumerate(self._by_slot) if entry is None]

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._by_id

    def __iter__(self) -> Iterator[Entry]:
        """Oldest first."""
        return iter(self._by_rank.values())

    def get(self, record_id: str) -> Entry | None:
        """The entry of that id."""
        return self._by_id.get(record_id)

    def priority(self, entry: Entry) -> float:
        """The priority of a record on the shelf."""
        return float(self._priorities[entry.slot])

    def highest_priority(self) -> float:
        """The highest priority on the shelf, 1 on an empty one: what a record without one gets at first."""
        return float(self._priorities.max()) if self._by_id else 1.0

    def next_slot(self) -> int:
        """The slot that the next record takes."""
        return self._free[0] if self._free else len(self._by_slot)

    def put(self, entry: Entry, priority: float) -> None:
        """Puts a record on the shelf. Its rank must be the highest yet, its slot ``next_slot``."""
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = len(self._by_slot)
            self._by_slot.append(None)
            if slot == len(self._priorities):
                self._priorities = np.concatenate([self._priorities, np.full(slot, _EMPTY)])
                self._versions = np.concatenate([self._versions, np.zeros(slot, np.int64)])
                self._trees.clear()
        assert slot == entry.slot
        self._place(entry, priority)

    def remove(self, entry: Entry) -> None:
        """Takes a record off the shelf."""
        del self._by_id[entry.id]
        del self._by_rank[entry.rank]
        self._by_slot[entry.slot] = None
        heapq.heappush(self._free, entry.slot)
        self._version_counts[entry.version] -= 1
        if not self._version_counts[entry.version]:
            del self._version_counts[entry.version]
        self._set_priority(entry.slot, _EMPTY)

    def set_priority(self, entry: Entry, priority: float) -> None:
        """Changes the priority of a record on the shelf."""
        self._set_priority(entry.slot, priority)

    def older_than_version(self, version: int) -> list[Entry]:
        """The records whose policy version is below ``version``."""
        if not self._has_older(version):
            return []
        slots = np.flatnonzero((self._versions < version) & (self._priorities >= 0))
        return [entry for slot in slots.tolist() if (entry := self._by_slot[slot]) is not None]

    def newest(self, count: int, *, least_version: int = 0, exclude: Collection[str] = ()) -> list[Draw]:
        """The newest records, newest first."""
        excluded = set(exclude)
        found: list[Draw] = []
        for entry in reversed(self._by_rank.values()):
            if len(found) == count:
                break
            if entry.version >= least_version and entry.id not in excluded:
                found.append(Draw(entry, self.priority(entry), 1.0, 1.0))
        return found

    def draw(
        self,
        count: int,
        random: np.random.Generator,
        *,
        exponent: float,
        correction: float = 0.0,
        least_version: int = 0,
        exclude: Collection[str] = (),
    ) -> list[Draw]:
        """Draws without replacement, each time with chances proportional to priority ** exponent.

        Equations 1 and 3.4 of Schaul et al. 2016 (arXiv:1511.05952): P(i) = p_i^a / sum_k p_k^a and
        w_i = (N P(i))^-b / max_j w_j over the batch, where N counts the records that qualify.
        """
        excluded = {entry.slot for record_id in exclude if (entry := self._by_id.get(record_id)) is not None}
        if self._has_older(least_version):
            drawn, total, qualifying = self._draw_masked(count, random, exponent, least_version, excluded)
        else:
            drawn, total, qualifying = self._draw_from_tree(count, random, exponent, excluded)
        chances = [weight / total for _, weight in drawn]
        corrections = [(qualifying * chance) ** -correction for chance in chances]
        highest = max(corrections, default=1.0)
        draws = []
        for (slot, _), chance, corrected in zip(drawn, chances, corrections, strict=True):
            entry = self._by_slot[slot]
            assert entry is not None
            draws.append(Draw(entry, self.priority(entry), chance, corrected / highest))
        return draws

    def _draw_from_tree(
        self, count: int, random: np.random.Generator, exponent: float, excluded: set[int]
    ) -> tuple[list[tuple[int, float]], float, int]:
        """Slots with their weights, the sum of weights at first, and how many qualify. O((count + excluded) log n)."""
        tree = self._tree(exponent)
        taken: list[tuple[int, float]] = []
        for slot in sorted(excluded):
            taken.append((slot, tree[slot]))
            tree[slot] = 0.0
        total = tree.total
        drawn: list[tuple[int, float]] = []
        while len(drawn) < count and tree.total > 0:
            slot = tree.find(random.random() * tree.total)
            drawn.append((slot, tree[slot]))
            tree[slot] = 0.0
        for slot, weight in taken + drawn:
            tree[slot] = weight
        return drawn, total, len(self) - len(excluded)

    def _draw_masked(
        self, count: int, random: np.random.Generator, exponent: float, least_version: int, excluded: set[int]
    ) -> tuple[list[tuple[int, float]], float, int]:
        """As ``_draw_from_tree``, in one pass over all records: for when some are too old but still kept."""
        mask = (self._versions >= least_version) & (self._priorities >= 0)
        mask[list(excluded)] = False
        slots = np.flatnonzero(mask)
        weights = self._priorities[slots] ** exponent
        positive = weights > 0
        # The smallest exponential keys are a weighted draw without replacement (Efraimidis and Spirakis 2006).
        keys = random.exponential(size=int(positive.sum())) / weights[positive]
        smallest = np.argpartition(keys, count)[:count] if count < len(keys) else np.arange(len(keys))
        chosen = np.flatnonzero(positive)[smallest[np.argsort(keys[smallest], kind="stable")]]
        return (
            [(int(slots[i]), float(weights[i])) for i in chosen],
            float(weights.sum()),
            len(slots),
        )

    def _has_older(self, version: int) -> bool:
        return min(self._version_counts, default=version) < version

    def _tree(self, exponent: float) -> SumTree:
        if exponent not in self._trees:
            weights = np.where(self._priorities >= 0, np.maximum(self._priorities, 0.0) ** exponent, 0.0)
            self._trees[exponent] = SumTree(weights)
            if len(self._trees) > _KEPT_TREES:
                self._trees.popitem(last=False)
        self._trees.move_to_end(exponent)
        return self._trees[exponent]

    def _place(self, entry: Entry, priority: float) -> None:
        self._by_id[entry.id] = entry
        self._by_rank[entry.rank] = entry
        self._by_slot[entry.slot] = entry
        self._versions[entry.slot] = entry.version
        self._version_counts[entry.version] += 1
        self._set_priority(entry.slot, priority)

    def _set_priority(self, slot: int, priority: float) -> None:
        self._priorities[slot] = priority
        for exponent, tree in self._trees.items():
            # By the array routine, as for the whole tree: a tree must not depend on when it was built.
            tree[slot] = 0.0 if priority < 0 else float((self._priorities[slot : slot + 1] ** exponent)[0])
