"""The groups of one step: fresh ones as they come together, those that collectors have queued, and replayed ones."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.clients.data import DataClient
from services.clients.replay import ReplayClient
from services.core.errors import DependencyLostError
from services.protocol.base import derive_seed
from services.protocol.groups import Group
from services.protocol.prompts import COLLECTOR_PREFIX, COLLECTORS, Split
from services.protocol.replay import AcknowledgeRequest, LeaseReply, LeaseRequest, SampledGroup, SampleGroupsRequest
from trainer.algorithm.loss import k3
from trainer.algorithm.packing import TrainingGroup
from trainer.algorithm.training_groups import PerToken
from trainer.config import TrainerSettings
from trainer.config.objective import Objective

if TYPE_CHECKING:
    from trainer.waves import Waves


class Batch:
    """The groups of one step: BATCH_SIZE of them, fewer when prompts were left out or are used up.

    With SOURCES it has exactly as many groups of each source as the schedule has in that step. A prompt that got no
    group, or a group without any reward, gives way to the next prompt of the same source.

    With dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) groups without a signal give way to those of further
    prompts of their source: DYNAMIC_SAMPLING_TRIES times at most, or that many batches of groups from the queue.
    """

    def __init__(self, objective: Objective, quotas: Mapping[str, int] | None = None) -> None:
        """Make the batch of a step with ``quotas``, the number of its groups by source; without: BATCH_SIZE of one."""
        self.objective, settings = objective, objective.settings
        self.settings = settings
        self.quotas = {"": settings.batch_size} if quotas is None else quotas
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
        self.counts: dict[str, float] = {}
        """Counts and other figures by metric name."""
        self.seconds_scoring = 0.0
        """Seconds of the newest ``generate_and_score`` from its last completion to its last group."""
        self.seconds_training = 0.0
        """Seconds of the newest ``generate_and_score`` after its last group, in which a wave was still trained on."""
        self.waves: Waves | None = None
        """The waves that are trained on while others are generated; None if the whole batch is trained on at once."""
        self._tries_left = settings.dynamic_sampling_tries
        self._is_closed = False
        self._dropped: Tally[str] = Tally()
        """The groups from the queue that were left out for want of a signal, by source."""

    @property
    def missing(self) -> dict[str, int]:
        """The number of prompts to fetch next, by source; no source that has all its groups."""
        there = _by_source(self.groups)
        missing = {source: quota - there[source] for source, quota in self.quotas.items()}
        return {} if self._is_closed else {source: count for source, count in missing.items() if count > 0}

    def add(self, groups: Sequence[Group]) -> None:
        """Take in the groups of the prompts that were fetched last; none if all of them were left out."""
        if not groups:
            return
        is_last_try = self._tries_left <= 0
        kept = [group for group in groups if self.is_counted(group) and (is_last_try or self._has_signal(group))]
        self._tries_left -= 1
        # Without SOURCES the last prompts may stay without groups; a source gets prompts until it has its quota.
        self._is_closed = is_last_try and self.settings.sources is None
        self.scored += groups
        self.groups += kept
        self.count("groups_resampled", _by_source(groups) - _by_source(kept))

    def take_leased(self, source: str, reply: LeaseReply) -> tuple[list[Group], list[Group]]:
        """Take in a lease of a source, and return its new groups, and those of them that are kept."""
        self.count("groups_dropped_stale", {source: reply.dropped_stale})
        # A lease that ran out meanwhile gave its groups back, and they may come once more.
        ids = {group.group_id for group in self.groups}
        new = [group for group in reply.groups if group.group_id not in ids]
        self.prompts_used += reply.dropped_stale + len(new)
        kept = []
        for group in new:
            may_drop = self._dropped[source] < self.settings.dynamic_sampling_tries * self.quotas[source]
            if may_drop and not self._has_signal(group):
                self._dropped[source] += 1
            elif self.is_counted(group):
                kept.append(group)
        if len(kept) < len(new):
            self.count("groups_resampled", _by_source(new) - _by_source(kept))
        self.scored += new
        self.groups += kept
        return new, kept

    def count(self, name: str, by_source: Mapping[str, int]) -> None:
        """Count groups by their source: in the metric of that name, and with SOURCES in that of each source."""
        of_each = {f"{name}/{source}": number for source, number in by_source.items() if source}
        for metric, number in ({name: sum(by_source.values())} | of_each).items():
            self.counts[metric] = self.counts.get(metric, 0.0) + number

    def prepared(self, groups: Sequence[Group]) -> list[TrainingGroup]:
        """Return groups of the step as the loss sees them, before their advantages are known; each is made once."""
        for group in groups:
            if id(group) not in self._prepared:
                self._prepared[id(group)] = self.objective.training_group(group)
        return [self._prepared[id(group)] for group in groups]

    def is_counted(self, group: Group) -> bool:
        """Return whether a group counts towards its source's quota: with SOURCES it has a reward."""
        needs_rewards = self.settings.sources is not None and self.settings.learns_from_rewards
        return not needs_rewards or not all(map(math.isnan, group.rewards))

    def _has_signal(self, group: Group) -> bool:
        return self.objective.has_signal(*self.prepared([group]))


def _by_source(groups: Sequence[Group]) -> Tally[str]:
    return Tally(group.prompt.source for group in groups)


LEASE_WAIT_SECONDS = 5.0

FRESH_WAIT_SECONDS = 900.0
"""Least patience with the collectors, without a new group, before the run ends: longer than an engine that was lost
takes to come back."""

LONGEST_ANSWER_MARGIN_SECONDS = 300.0
"""Patience beyond the longest time of an answer, for its place among the others and its scoring."""


class FreshQueue:
    """Groups on lease from the replay-buffer's queue; a lease is acknowledged once its groups were trained on."""

    def __init__(
        self, settings: TrainerSettings, data: DataClient, replay: ReplayClient, judge: Callable[[list[Group]], None]
    ) -> None:
        """Wrap the queue; ``judge`` gets each lease's new groups, and raises an error if the run can learn nothing."""
        self.settings = settings
        self.data = data
        self.replay = replay
        self.judge = judge
        self.collector: asyncio.Task[None] | None = None
        """The task of the collector in this process; None when all run elsewhere."""
        self._leases: list[str] = []
        self._has_begun = False
        """False before the first request, which ends the leases of a trainer that was killed."""
        self._has_a_lease_a_group = settings.dynamic_sampling_tries > 0 or settings.sources is not None

    async def lease(self, batch: Batch, policy_version: int) -> None:
        """Fill ``batch`` with groups no staler than MAX_STALENESS; the last batch of the run may stay smaller.

        With dynamic sampling or SOURCES each group has a lease of its own. That of a group that is left out is
        acknowledged at once, so that collectors have room for another.

        Raises:
            ConfigurationError: every answer of too many groups in a row failed.
            DependencyLostError: no new group came for FRESH_WAIT_SECONDS, or longer where answers may take longer.
        """
        batch.count("groups_dropped_stale", {})
        in_vain: Tally[str] = Tally()
        newest = time.monotonic()
        while missing := batch.missing:
            # A source that had no group waits for its next turn, so that those of the others are taken first.
            source = min(missing, key=lambda name: in_vain[name])
            most = 1 if self._has_a_lease_a_group else missing[source]
            collectors_done = await self._collectors_are_done()
            request = LeaseRequest(
                source=source,
                max_groups=most,
                min_groups=1 if collectors_done else most,
                min_policy_version=max(policy_version - self.settings.max_staleness, 0),
                wait_seconds=0.0 if collectors_done else LEASE_WAIT_SECONDS,
                starts=not self._has_begun,
            )
            reply = await self.replay.lease(request)
            self._has_begun = True
            new, kept = batch.take_leased(source, reply)
            in_vain[source] += not new
            if new:
                newest = time.monotonic()
                self.judge(new)
            if reply.lease_id is not None and (kept or most > 1):
                self._leases.append(reply.lease_id)
            elif reply.lease_id is not None:
                await self._acknowledge(reply.lease_id)
            elif collectors_done:
                break
            elif time.monotonic() - newest > self._patience:
                if self.settings.sources is None and await self._prompts_are_used_up():
                    break
                raise self._lost(batch)

    @property
    def _patience(self) -> float:
        """Longest time in seconds without a new group."""
        longest = max(own.answer_seconds for own in self.settings.by_source().values())
        return max(FRESH_WAIT_SECONDS, longest + LONGEST_ANSWER_MARGIN_SECONDS)

    def _lost(self, batch: Batch) -> DependencyLostError:
        """Return the error of a queue that gives no new groups."""
        of_sources = "".join(
            f", {count} of source {name!r} are missing" for name, count in batch.missing.items() if name
        )
        return DependencyLostError(
            f"the fresh queue gave {len(batch.groups)} of {self.settings.batch_size} groups, none of "
            f"them in the last {self._patience:g} s{of_sources}; are collectors running?"
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
        if self.settings.sources is not None:
            return False  # they have prompts for as many steps as there are
        epochs = {consumer: cursor["epoch"] for consumer, cursor in (await self.data.stats()).cursors.items()}
        shared = epochs.get(f"{COLLECTORS}/{Split.TRAIN.value}", 0)
        each = [epoch for consumer, epoch in epochs.items() if consumer.startswith(COLLECTOR_PREFIX)]
        return bool(each) and min(shared, *each) >= self.settings.num_epochs

    async def _prompts_are_used_up(self) -> bool:
        return (await self.data.cursor(COLLECTORS)).epoch >= self.settings.num_epochs


REPLAY_EXPONENT = 1.0
"""Alpha of prioritised replay (arXiv:1511.05952): a group is drawn in proportion to its priority."""
REPLAY_CORRECTION = 0.4
"""Beta of prioritised replay, the paper's first value: 1 would undo the effect of the priorities on the gradient."""


async def sample_groups(
    settings: TrainerSettings, replay: ReplayClient, step: int, policy_version: int, fresh: Sequence[Group]
) -> list[SampledGroup]:
    """Return REPLAY_GROUPS groups, none of them in ``fresh`` or staler than REPLAY_MAX_STALENESS.

    The draw is seeded by the step, so that a resumed run samples the same groups. Each source has its own draw, because
    priorities follow the scale of rewards, and its share of the groups.
    """
    drawn = step * settings.replay_groups
    samples: list[SampledGroup] = []
    for source, count in settings.schedule.counts(drawn, drawn + settings.replay_groups).items():
        if count:
            request = SampleGroupsRequest(
                source=source,
                batch_size=count,
                exponent=REPLAY_EXPONENT,
                correction=REPLAY_CORRECTION,
                min_policy_version=max(policy_version - settings.replay_max_staleness, 0),
                exclude=[g.group_id for g in fresh],
                seed=derive_seed(settings.seed, "replay", step, *([source] if source else [])),
            )
            samples += await replay.sample(request)
    return samples


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
