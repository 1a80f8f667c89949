"""From scored groups to what the loss sees: rewards with their penalties, masks, advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from services.core.errors import ConfigurationError
from services.core.functions import load_function
from services.protocol.groups import Experience, FinishReason, Group
from trainer.algorithm.advantages import ADVANTAGE_FUNCTIONS, AdvantageFunction, Outcomes, overlong_penalty
from trainer.algorithm.methods import is_own_function
from trainer.algorithm.packing import TrainingGroup, TrainingSequence
from trainer.config import TrainerSettings

TokenNumbers = list[list[float]]
"""Numbers of a group's trained tokens, by completion."""


def training_group(
    group: Group, settings: TrainerSettings, *, weight: float = 1.0, is_replayed: bool = False
) -> TrainingGroup:
    """Return a group's scored completions as the loss sees them, before their advantages are known.

    Completions without a reward are left out. The overlong penalty is part of the reward. With MASK_TRUNCATED no token
    of a completion that was cut off is trained on, while its reward still counts in its group.

    Args:
        group: the group as generated, or as stored in the replay buffer.
        settings: OVERLONG_BUFFER, MAX_NEW_TOKENS and MASK_TRUNCATED.
        weight: importance weight of the group.
        is_replayed: the group comes from the replay buffer.
    """
    scored = [e for e in group.experiences if e.reward is not None and e.finish_reason is not FinishReason.ABORT]
    sequences = [
        TrainingSequence(
            completion_ids=e.completion_ids,
            behaviour_logprobs=e.logprobs,
            advantages=[0.0] * len(e.completion_ids) if e.advantages is None else e.advantages,
            loss_mask=_loss_mask(e, settings),
            reward=_reward(e, settings),
            has_own_advantages=e.advantages is not None,
        )
        for e in scored
    ]
    return TrainingGroup(group.prompt_ids, sequences, group.group_id, weight, is_replayed)


def _reward(experience: Experience, settings: TrainerSettings) -> float:
    assert experience.reward is not None
    if not settings.overlong_buffer:
        return experience.reward
    length = torch.tensor([len(experience.completion_ids)])
    return experience.reward + overlong_penalty(length, settings.max_new_tokens, settings.overlong_buffer).item()


def _loss_mask(experience: Experience, settings: TrainerSettings) -> list[bool] | None:
    if settings.mask_truncated and experience.finish_reason is FinishReason.LENGTH:
        return [False] * len(experience.completion_ids)
    return experience.loss_mask


def has_signal(group: Group, settings: TrainerSettings) -> bool:
    """Return whether two completions of the group have different rewards, or one has advantages of its own."""
    sequences = training_group(group, settings).sequences
    own = any(any(s.advantages) for s in sequences if s.has_own_advantages)
    return own or len({s.reward for s in sequences}) > 1


def with_advantages(
    groups: Sequence[TrainingGroup], settings: TrainerSettings, reference: Sequence[TokenNumbers] | None = None
) -> list[TrainingGroup]:
    """Return the groups of a step with their advantages, by the formula that ADVANTAGE names.

    Args:
        groups: all groups of the step, because some formulas take statistics over the batch.
        settings: ADVANTAGE, ADVANTAGE_EPS and KL_COEF.
        reference: log-probabilities of the reference for each group, for KL in the reward. A completion's reward is
            then less by KL_COEF times the sum over its trained tokens of log(pi_behaviour / pi_reference): k1, whose
            gradient by way of the reward is that of KL(theta || reference) (arXiv:2501.03262, eq. 3).

    Raises:
        ConfigurationError: ADVANTAGE names a function that cannot be had, or that returns something else.
    """
    sequences = [(i, s) for i, group in enumerate(groups) for s in group.sequences]
    if not sequences:
        return list(groups)
    rewards = torch.tensor([s.reward for _, s in sequences], dtype=torch.float64)
    if reference is not None:
        flat = [logprobs for of_group in reference for logprobs in of_group]
        distances = [sum(s.trained(s.behaviour_logprobs)) - sum(r) for (_, s), r in zip(sequences, flat, strict=True)]
        rewards -= settings.kl_coef * torch.tensor(distances, dtype=torch.float64)
    outcomes = Outcomes(
        rewards=rewards,
        group_ids=torch.tensor([i for i, _ in sequences]),
        lengths=torch.tensor([s.trained_tokens for _, s in sequences]),
        eps=settings.advantage_eps,
    )
    advantages = iter(advantage_function(settings)(outcomes).tolist())
    return [replace(g, sequences=[_with_advantage(s, next(advantages)) for s in g.sequences]) for g in groups]


def advantage_function(settings: TrainerSettings) -> AdvantageFunction:
    """Return the function that ADVANTAGE names.

    Raises:
        ConfigurationError: it is a function of the user's own that cannot be had.
    """
    if not is_own_function(settings.advantage):
        return ADVANTAGE_FUNCTIONS[settings.advantage]
    function = load_function("ADVANTAGE", settings.advantage)

    def advantages(outcomes: Outcomes) -> torch.Tensor:
        result = function(outcomes)
        if not isinstance(result, torch.Tensor) or result.shape != outcomes.rewards.shape:
            raise ConfigurationError(
                f"ADVANTAGE={settings.advantage} must return a tensor with one number for each of "
                f"{len(outcomes.rewards)} completions"
            )
        return result

    return advantages


def _with_advantage(sequence: TrainingSequence, advantage: float) -> TrainingSequence:
    if sequence.has_own_advantages:
        return sequence
    return replace(sequence, advantages=[advantage] * len(sequence.completion_ids))
