"""The trainer's end of the asynchronous mode: it leases the groups that collectors put into the fresh queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from services.clients.data import DataClient
from services.clients.replay import ReplayClient
from services.core.errors import DependencyLostError
from services.protocol.groups import Group
from services.protocol.prompts import Split
from services.protocol.replay import AcknowledgeRequest, LeaseRequest
from trainer.collector import COLLECTOR_PREFIX, COLLECTORS
from trainer.config import TrainerSettings
from trainer.rollouts.batch import Batch

LEASE_WAIT_SECONDS = 5.0

FRESH_WAIT_SECONDS = 900.0
"""Least patience with the collectors, without a new group, before the run ends: longer than an engine that was lost
takes to come back."""

LONGEST_ANSWER_MARGIN_SECONDS = 300.0
"""Patience beyond the longest time of an answer, for its place among the others and its scoring."""


class FreshQueue:
    """Groups on lease from the replay-buffer's queue; a lease is acknowledged once its groups were trained on."""

    def __init__(
        self,
        settings: TrainerSettings,
        data: DataClient,
        replay: ReplayClient,
        judge: Callable[[Sequence[Group]], None],
        collector: asyncio.Task[None] | None = None,
    ) -> None:
        """Wrap the queue; ``judge`` gets each lease's new groups, and raises an error if the run can learn nothing.

        ``collector`` is the task of the collector in this process, None when all run elsewhere.
        """
        self.settings = settings
        self.data = data
        self.replay = replay
        self.judge = judge
        self.collector = collector
        self._leases: list[str] = []

    async def lease(self, batch: Batch, policy_version: int) -> None:
        """Fill ``batch`` with groups no staler than MAX_STALENESS; the last batch of the run may stay smaller.

        With dynamic sampling each group has a lease of its own. That of a group without a signal is acknowledged at
        once, so that collectors have room for another.

        Raises:
            ConfigurationError: every answer of too many groups in a row failed.
            DependencyLostError: no new group came for FRESH_WAIT_SECONDS, or longer where answers may take longer.
        """
        batch.counts["groups_dropped_stale"] = 0.0
        patience = max(FRESH_WAIT_SECONDS, self.settings.longest_answer_seconds + LONGEST_ANSWER_MARGIN_SECONDS)
        newest = time.monotonic()
        while batch.missing:
            most = 1 if self.settings.dynamic_sampling_tries else batch.missing
            collectors_done = await self._collectors_are_done()
            reply = await self.replay.lease(
                LeaseRequest(
                    max_groups=most,
                    min_groups=1 if collectors_done else most,
                    min_policy_version=max(policy_version - self.settings.max_staleness, 0),
                    wait_seconds=0.0 if collectors_done else LEASE_WAIT_SECONDS,
                )
            )
            batch.counts["groups_dropped_stale"] += reply.dropped_stale
            batch.prompts_used += reply.dropped_stale
            # A lease that ran out meanwhile gave its groups back, and they may come once more.
            held = {group.group_id for group in batch.groups}
            new = [group for group in reply.groups if group.group_id not in held]
            kept = batch.take(new)
            batch.prompts_used += len(new)
            if new:
                newest = time.monotonic()
                self.judge(new)
            if reply.lease_id is not None and (kept or most > 1):
                self._leases.append(reply.lease_id)
            elif reply.lease_id is not None:
                await self._acknowledge(reply.lease_id)
            elif collectors_done:
                break
            elif time.monotonic() - newest > patience:
                if await self._prompts_are_used_up():
                    break
                raise DependencyLostError(
                    f"the fresh queue gave {len(batch.groups)} of {self.settings.batch_size} groups, none of "
                    f"them in the last {patience:g} s; are collectors running?"
                )

    async def acknowledge(self) -> None:
        """Acknowledge the leases of the last batch, which moves its groups into the replay store."""
        for lease_id in self._leases:
            await self._acknowledge(lease_id)
        self._leases.clear()

    async def _acknowledge(self, lease_id: str) -> None:
        await self.replay.acknowledge(AcknowledgeRequest(lease_id=lease_id, keep=self.settings.replay_groups > 0))

    async def _collectors_are_done(self) -> bool:
        """Return whether every prompt's group is in the queue; raise the error of the collector in this process."""
        if self.collector is not None:
            if self.collector.done():
                self.collector.result()
            return self.collector.done()
        epochs = {consumer: cursor["epoch"] for consumer, cursor in (await self.data.stats()).cursors.items()}
        shared = epochs.get(f"{COLLECTORS}/{Split.TRAIN.value}", 0)
        each = [epoch for consumer, epoch in epochs.items() if consumer.startswith(COLLECTOR_PREFIX)]
        return bool(each) and min(shared, *each) >= self.settings.num_epochs

    async def _prompts_are_used_up(self) -> bool:
        return (await self.data.cursor(COLLECTORS)).epoch >= self.settings.num_epochs
