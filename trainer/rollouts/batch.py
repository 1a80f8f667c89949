"""The groups of one step: fresh ones as they come together, those that collectors have queued, and replayed ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.clients.data import DataClient
from services.clients.replay import ReplayClient
from services.core.errors import DependencyLostError
from services.protocol.base import derive_seed
from services.protocol.groups import Group
from services.protocol.prompts import COLLECTOR_PREFIX, COLLECTORS, Split
from services.protocol.replay import AcknowledgeRequest, LeaseRequest, SampledGroup, SampleGroupsRequest
from trainer.algorithm.loss import k3
from trainer.algorithm.packing import TrainingGroup
from trainer.algorithm.training_groups import PerToken
from trainer.config import TrainerSettings
from trainer.config.objective import Objective


class Batch:
    """The groups of one step: BATCH_SIZE of them, fewer when prompts were left out or are used up.

    With dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) groups without a signal give way to those of further
    prompts: DYNAMIC_SAMPLING_TRIES times at most, or that many batches of groups from the queue.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective, settings = objective, objective.settings
        self.settings = settings
        self.groups: list[Group] = []
        """The groups to train on."""
        self.scored: list[Group] = []
        """All groups made for the step, those without a signal included."""
        self._prepared: dict[int, TrainingGroup] = {}
        """Groups made for the step as the loss sees them, before their advantages are known, by ``id``."""
        self.prompts_used = 0
        """Prompts of the step, those that got no group and those of groups that were too stale included."""
        self.replayed: list[SampledGroup] = []
        """The groups drawn from the replay buffer."""
        self.trained: list[TrainingGroup] = []
        """The groups, fresh and replayed, with their advantages, as the loss sees them."""
        self.position = 0.0
        """The step's position in the schedule of the learning rate, in steps."""
        self.counts: dict[str, float] = {}
        """Counts and other figures by metric name."""
        self.seconds_scoring = 0.0
        """Seconds of the newest ``generate_and_score`` after its last completion was generated."""
        self._tries_left = settings.dynamic_sampling_tries
        self._is_closed = False

    @property
    def missing(self) -> int:
        """The number of prompts to fetch next."""
        return 0 if self._is_closed else self.settings.batch_size - len(self.groups)

    def add(self, groups: Sequence[Group]) -> None:
        """Take in the groups of the prompts that were fetched last; none if all of them were left out."""
        if not groups:
            return
        self._is_closed = self._tries_left == 0
        kept = [group for group in groups if self._is_closed or self._has_signal(group)]
        self._tries_left -= 1
        self.scored += groups
        self.groups += kept
        self.counts["groups_resampled"] = self.counts.get("groups_resampled", 0.0) + len(groups) - len(kept)

    def take(self, leased: Sequence[Group]) -> list[Group]:
        """Take in groups from the queue of fresh groups, and return those that are kept."""
        kept = []
        for group in leased:
            dropped = self.counts.get("groups_resampled", 0.0)
            most = self.settings.dynamic_sampling_tries * self.settings.batch_size
            if dropped < most and not self._has_signal(group):
                self.counts["groups_resampled"] = dropped + 1
            else:
                kept.append(group)
        self.scored += leased
        self.groups += kept
        return kept

    def prepared(self, groups: Sequence[Group]) -> list[TrainingGroup]:
        """Return groups of the step as the loss sees them, before their advantages are known; each is made once."""
        for group in groups:
            if id(group) not in self._prepared:
                self._prepared[id(group)] = self.objective.training_group(group)
        return [self._prepared[id(group)] for group in groups]

    def _has_signal(self, group: Group) -> bool:
        return self.objective.has_signal(*self.prepared([group]))


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
        patience = max(FRESH_WAIT_SECONDS, self.settings.way.longest_answer_seconds + LONGEST_ANSWER_MARGIN_SECONDS)
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
            ids = {group.group_id for group in batch.groups}
            new = [group for group in reply.groups if group.group_id not in ids]
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


async def sample_groups(
    settings: TrainerSettings, replay: ReplayClient, step: int, policy_version: int, fresh: Sequence[Group]
) -> list[SampledGroup]:
    """Return REPLAY_GROUPS groups every REPLAY_EVERY steps, none in ``fresh`` or staler than REPLAY_MAX_STALENESS.

    The draw is seeded by the step, so that a resumed run samples the same groups.
    """
    if settings.replay_groups == 0 or (step + 1) % settings.replay_every:
        return []
    return await replay.sample(
        SampleGroupsRequest(
            batch_size=settings.replay_groups,
            strategy=settings.replay_strategy,
            exponent=settings.replay_exponent,
            correction=settings.replay_correction,
            min_policy_version=max(policy_version - settings.replay_max_staleness, 0),
            exclude=[g.group_id for g in fresh],
            seed=derive_seed(settings.seed, "replay", step),
        )
    )


def within_kl(groups: Sequence[TrainingGroup], logprobs: Sequence[PerToken], max_kl: float) -> list[TrainingGroup]:
    """Return the groups whose KL from the policy that sampled them to the present one is at most ``max_kl``.

    Args:
        groups: groups from the replay buffer.
        logprobs: the present policy's log-probabilities of each group's trained tokens, by completion.
        max_kl: nats a token, estimated by k3 over the group's trained tokens.
    """

    def distance(group: TrainingGroup, now: PerToken) -> float:
        before = torch.from_numpy(np.concatenate([s.trained(s.logprobs) for s in group.sequences])).float()
        after = torch.from_numpy(np.concatenate(now)).float()
        return k3(before, after).mean().item() if len(before) else 0.0

    return [group for group, now in zip(groups, logprobs, strict=True) if distance(group, now) <= max_kl]
