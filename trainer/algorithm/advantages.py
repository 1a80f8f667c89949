"""What the loss trains on: a group's scored completions with their advantages."""

from __future__ import annotations

import torch

from services.protocol import FinishReason, Group
from trainer.algorithm import grpo
from trainer.algorithm.packing import TrainingGroup, TrainingSequence
from trainer.config import TrainerSettings


def training_group(group: Group, settings: TrainerSettings, weight: float = 1.0) -> TrainingGroup:
    """What the loss sees of a group: scored completions with their advantages.

    Args:
        group: as made or as stored.
        settings: advantage method and overlong penalty.
        weight: importance weight of the group.
    """
    experiences = [e for e in group.experiences if e.reward is not None and e.finish_reason is not FinishReason.ABORT]
    rewards = torch.tensor([e.reward for e in experiences], dtype=torch.float64)
    if settings.overlong_buffer:
        lengths = torch.tensor([len(e.completion_ids) for e in experiences])
        rewards = rewards + grpo.overlong_penalty(lengths, settings.max_new_tokens, settings.overlong_buffer)
    advantages = grpo.group_advantages(
        rewards, torch.zeros(len(experiences), dtype=torch.int64), settings.advantage, settings.advantage_eps
    )
    return TrainingGroup(
        prompt_ids=group.prompt_ids,
        sequences=[
            TrainingSequence(e.completion_ids, e.logprobs, advantage, weight)
            for e, advantage in zip(experiences, advantages.tolist(), strict=True)
        ],
        group_id=group.group_id,
    )


def has_signal(group: Group, settings: TrainerSettings) -> bool:
    """True when some completion of the group has an advantage."""
    return any(sequence.advantage for sequence in training_group(group, settings).sequences)
