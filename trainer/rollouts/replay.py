"""Step 7: whole groups from the replay buffer, each with its own advantages and its stored behaviour
log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from services.clients.replay import ReplayClient
from services.protocol import Group, SampledGroup, SampleGroupsRequest
from trainer.config import TrainerSettings
from trainer.rollouts.groups import derive_seed


async def sample_groups(
    settings: TrainerSettings, replay: ReplayClient, step: int, policy_version: int, fresh: Sequence[Group]
) -> list[SampledGroup]:
    """Up to REPLAY_GROUPS groups every REPLAY_EVERY steps, none in ``fresh`` and none staler than REPLAY_MAX_STALENESS.

    Seeded by the step, so that a resumed run samples the same.
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


def updated_priorities(groups: Sequence[Group], signal: dict[str, float]) -> dict[str, float]:
    """New priorities by group id: the mean over tokens of |importance weight * advantage| that the trainer saw.

    A group that the current policy would hardly produce any more, or whose completions are all alike, sinks.
    """
    tokens = {g.group_id: sum(len(e.completion_ids) for e in g.experiences) for g in groups}
    return {g.group_id: signal.get(g.group_id, 0.0) / max(tokens[g.group_id], 1) for g in groups}
