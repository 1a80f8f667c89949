"""The draw of whole groups from the replay buffer, and the bound on their distance from the present policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.clients.replay import ReplayClient
from services.protocol.base import derive_seed
from services.protocol.groups import Group
from services.protocol.replay import SampledGroup, SampleGroupsRequest
from trainer.algorithm.loss import k3
from trainer.algorithm.packing import TrainingGroup
from trainer.algorithm.training_groups import TokenNumbers
from trainer.config import TrainerSettings


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


def within_kl(groups: Sequence[TrainingGroup], logprobs: Sequence[TokenNumbers], max_kl: float) -> list[TrainingGroup]:
    """Return the groups whose KL from the policy that sampled them to the present one is at most ``max_kl``.

    Args:
        groups: groups from the replay buffer.
        logprobs: the present policy's log-probabilities of each group's trained tokens, by completion.
        max_kl: nats a token, estimated by k3 over the group's trained tokens.
    """

    def distance(group: TrainingGroup, now: TokenNumbers) -> float:
        before = [x for s in group.sequences for x in s.trained(s.behaviour_logprobs)]
        after = [x for numbers in now for x in numbers]
        return k3(torch.tensor(before), torch.tensor(after)).mean().item() if before else 0.0

    return [group for group, now in zip(groups, logprobs, strict=True) if distance(group, now) <= max_kl]
