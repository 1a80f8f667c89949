"""Where a step's groups come from: generated for the step (synchronous), or from the fresh queue (asynchronous)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from services.clients.data import DataClient
from services.clients.replay import ReplayClient
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.protocol import AcknowledgeRequest, Cursor, Group, LeaseRequest, Prompt, Split
from trainer.algorithm.advantages import has_signal
from trainer.collector import COLLECTOR_PREFIX, COLLECTORS
from trainer.config import FRESH_WAIT_SECONDS, TrainerSettings
from trainer.rollouts.curriculum import SuccessRates
from trainer.rollouts.groups import GroupMaker, initial_priority

log = get_logger(__name__)

LEASE_WAIT_SECONDS = 5.0


@dataclass
class Batch:
    """The groups of one step, and what it took to get them."""

    groups: list[Group]
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)


def _add(sums: dict[str, float], name: str, value: float) -> None:
    sums[name] = sums.get(name, 0.0) + value


class GroupSource(Protocol):
    """Hands out each step's groups, each group once."""

    async def next(self, policy_version: int) -> Batch:
        """The next batch. Empty when the training prompts are used up."""

    async def trained(self) -> None:
        """The last batch was trained on."""

    def cursor(self) -> Cursor:
        """Which prompts are used, the last batch included."""


class SynchronousSource:
    """Steps 1 to 4: fetch prompts, generate, score, store; nothing runs ahead of the step."""

    def __init__(
        self, settings: TrainerSettings, data: DataClient, maker: GroupMaker, replay: ReplayClient, cursor: Cursor
    ) -> None:
        self.settings = settings
        self.data = data
        self.maker = maker
        self.replay = replay
        self.success_rates = SuccessRates(data, settings.batch_size)
        self._cursor = cursor

    async def next(self, policy_version: int) -> Batch:
        """See GroupSource."""
        batch = Batch([])
        cursor = self._cursor
        scored: list[Group] = []
        wanted = self.settings.batch_size
        for attempt in range(self.settings.dynamic_sampling_tries + 1):
            made, cursor = await self._make(wanted, cursor, batch.seconds)
            scored += made
            last = attempt == self.settings.dynamic_sampling_tries or not made
            kept = made if last else [g for g in made if has_signal(g, self.settings)]
            _add(batch.counts, "groups_resampled", len(made) - len(kept))
            batch.groups += kept
            wanted = self.settings.batch_size - len(batch.groups)
            if wanted == 0 or last:
                break
        started = time.perf_counter()
        if batch.groups:
            await self.replay.add(batch.groups, [initial_priority(g) for g in batch.groups])
        await self.success_rates.record(scored)
        batch.seconds["store"] = time.perf_counter() - started
        self._cursor = cursor
        return batch

    async def trained(self) -> None:
        """Nothing to do: the groups are in the replay buffer already."""

    def cursor(self) -> Cursor:
        """See GroupSource."""
        return self._cursor

    async def _make(self, wanted: int, cursor: Cursor, seconds: dict[str, float]) -> tuple[list[Group], Cursor]:
        """Groups of the next ``wanted`` prompts, or of those after them when all were left out; none at the end.

        Raises:
            ConfigurationError, DependencyLostError: too many prompts in a row were left out.
        """
        while True:
            prompts, cursor = await self._prompts(wanted, cursor)
            started = time.perf_counter()
            made = [g for g in await asyncio.gather(*map(self.maker.make, prompts)) if g is not None]
            generated = max(self.maker.last_generated, started)
            _add(seconds, "generate", generated - started)
            _add(seconds, "score", time.perf_counter() - generated)
            if made or not prompts:
                return made, cursor
            self.maker.generator.check(self.settings.batch_size)

    async def _prompts(self, wanted: int, cursor: Cursor) -> tuple[list[Prompt], Cursor]:
        """Up to ``wanted`` prompts of the epochs to be trained."""
        reply = await self.data.prompts(wanted, cursor=cursor)
        return [p for p in reply.prompts if p.epoch < self.settings.num_epochs], reply.cursor


class AsynchronousSource:
    """Leases groups which collectors pushed into the fresh queue; a lease is acknowledged once trained on."""

    def __init__(
        self, settings: TrainerSettings, data: DataClient, replay: ReplayClient, collector: asyncio.Task[None] | None
    ) -> None:
        """``collector`` is the task of the collector beside the trainer, None when all run elsewhere."""
        self.settings = settings
        self.data = data
        self.replay = replay
        self.collector = collector
        self._leases: list[str] = []

    async def next(self, policy_version: int) -> Batch:
        """See GroupSource. The last batch may be smaller.

        Raises:
            DependencyLostError: not enough fresh groups came within FRESH_WAIT_SECONDS.
        """
        batch = Batch([], counts={"groups_dropped_stale": 0.0})
        started = time.monotonic()
        while (missing := self.settings.batch_size - len(batch.groups)) > 0:
            collectors_done = await self._collectors_are_done()
            reply = await self.replay.lease(
                LeaseRequest(
                    max_groups=missing,
                    min_groups=1 if collectors_done else missing,
                    min_policy_version=max(policy_version - self.settings.max_staleness, 0),
                    wait_seconds=0.0 if collectors_done else LEASE_WAIT_SECONDS,
                )
            )
            batch.counts["groups_dropped_stale"] += reply.dropped_stale
            # A lease that ran out meanwhile gave its groups back, and they may come once more.
            held = {group.group_id for group in batch.groups}
            batch.groups += [group for group in reply.groups if group.group_id not in held]
            if reply.lease_id is not None:
                self._leases.append(reply.lease_id)
            elif collectors_done:
                break
            elif time.monotonic() - started > FRESH_WAIT_SECONDS:
                if await self._prompts_are_used_up():
                    break
                raise DependencyLostError(
                    f"the fresh queue gave {len(batch.groups)} of {self.settings.batch_size} groups within "
                    f"{FRESH_WAIT_SECONDS:g} s; are collectors running?"
                )
        batch.seconds["wait"] = time.monotonic() - started
        return batch

    async def trained(self) -> None:
        """Acknowledges the batch's leases, which moves its groups into the replay store."""
        for lease_id in self._leases:
            await self.replay.acknowledge(AcknowledgeRequest(lease_id=lease_id, keep=self.settings.replay_groups > 0))
        self._leases.clear()

    def cursor(self) -> Cursor:
        """The collectors' cursor lives in the data-server."""
        return Cursor()

    async def _collectors_are_done(self) -> bool:
        """True when all prompts are collected, and none is in flight; raises what the one beside us failed with."""
        if self.collector is not None:
            if self.collector.done():
                self.collector.result()
            return self.collector.done()
        stand = {consumer: cursor["epoch"] for consumer, cursor in (await self.data.stats()).cursors.items()}
        shared = stand.get(f"{COLLECTORS}/{Split.TRAIN.value}", 0)
        each = [epoch for consumer, epoch in stand.items() if consumer.startswith(COLLECTOR_PREFIX)]
        return bool(each) and min(shared, *each) >= self.settings.num_epochs

    async def _prompts_are_used_up(self) -> bool:
        return (await self.data.cursor(COLLECTORS)).epoch >= self.settings.num_epochs
