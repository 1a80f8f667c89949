"""Groups as the loss sees them: scored completions with their advantages."""

from __future__ import annotations

import torch

from services.protocol.groups import FinishReason, Group
from trainer.algorithm import grpo
from trainer.algorithm.packing import TrainingGroup, TrainingSequence
from trainer.config import TrainerSettings


def training_group(group: Group, settings: TrainerSettings, weight: float = 1.0) -> TrainingGroup:
    """Return a group's scored completions with their advantages; completions without a reward are left out.

    Args:
        group: the group as generated, or as stored in the replay buffer.
        settings: ADVANTAGE, OVERLONG_BUFFER and MAX_NEW_TOKENS.
        weight: importance weight of the group.
    """
    experiences = [e for e in group.experiences if e.reward is not None and e.finish_reason is not FinishReason.ABORT]
    rewards = torch.tensor([e.reward for e in experiences], dtype=torch.float64)
    if settings.overlong_buffer:
        lengths = torch.tensor([len(e.completion_ids) for e in experiences])
        rewards = rewards + grpo.overlong_penalty(lengths, settings.max_new_tokens, settings.overlong_buffer)
    one_group = torch.zeros(len(experiences), dtype=torch.int64)
    advantages = grpo.group_advantages(rewards, one_group, settings.advantage, settings.advantage_eps).tolist()
    return TrainingGroup(
        prompt_ids=group.prompt_ids,
        sequences=[
            TrainingSequence(e.completion_ids, e.logprobs, advantage, weight)
            for e, advantage in zip(experiences, advantages, strict=True)
        ],
        group_id=group.group_id,
    )


def has_signal(group: Group, settings: TrainerSettings) -> bool:
    """Return True when a completion of the group has an advantage other than 0."""
    return any(sequence.advantage for sequence in training_group(group, settings).sequences)
