"""Step 7: the draw of whole groups from the replay buffer, and their new priorities."""

from __future__ import annotations

from collections.abc import Sequence

from services.clients.replay import ReplayClient
from services.core.seeds import derive_seed
from services.protocol.groups import Group
from services.protocol.replay import SampledGroup, SampleGroupsRequest
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


def updated_priorities(replayed: Sequence[SampledGroup], signal: dict[str, float]) -> dict[str, float]:
    """Return new priorities by group id: the mean over tokens of |importance weight * advantage| in the update.

    A group sinks when the current policy would hardly produce it any more, or when its completions are all alike.

    Args:
        replayed: the groups of the update.
        signal: the sum over tokens by group id; see UpdateResult.
    """
    tokens = {s.group.group_id: sum(len(e.completion_ids) for e in s.group.experiences) for s in replayed}
    return {group_id: signal.get(group_id, 0.0) / max(count, 1) for group_id, count in tokens.items()}
