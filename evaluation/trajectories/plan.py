"""The episodes of a run: which policies play which seeds, and which file each episode belongs to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SEEDS = 2**31


@dataclass(frozen=True)
class Shard:
    """A file's episodes: the seeds ``start`` to ``stop`` (exclusive) of one lineup, counted from the run's seed."""

    number: int
    lineup: tuple[str, ...]
    """The policy in each seat."""
    first_episode: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The file's name."""
        return f"shard-{self.number:06d}.parquet"


@dataclass(frozen=True)
class Plan:
    """All episodes, which depend on nothing but these fields.

    Every lineup plays the same seeds: ``seed``, ``seed`` + 1 and so on.
    """

    lineups: Sequence[tuple[str, ...]]
    episodes: int
    """Episodes of each lineup."""
    seed: int
    shard_episodes: int

    def shards(self) -> Iterator[Shard]:
        """Yield the shards in order. Episodes are numbered over all of them."""
        number = itertools.count()
        for place, lineup in enumerate(self.lineups):
            for start in range(0, self.episodes, self.shard_episodes):
                stop = min(start + self.shard_episodes, self.episodes)
                yield Shard(next(number), lineup, place * self.episodes + start, start, stop)

    def seed_of(self, index: int) -> int:
        """Return the seed of a lineup's episode ``index``."""
        return (self.seed + index) % SEEDS


def lineups_of(policies: Sequence[str], seats: int) -> list[tuple[str, ...]]:
    """Return who sits where: each policy alone, or with several seats each ordered choice of different policies.

    If there are fewer policies than seats, policies also sit in several seats.
    """
    if len(policies) >= seats:
        return list(itertools.permutations(policies, seats))
    return list(itertools.product(policies, repeat=seats))
