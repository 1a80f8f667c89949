"""From scored groups to what the loss sees: rewards with their penalties, masks, advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from services.core.errors import ConfigurationError
from services.core.functions import load_function
from services.protocol.groups import Experience, FinishReason, Group, by_episode
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
    sequences = [
        TrainingSequence(
            completion_ids=e.completion_ids,
            behaviour_logprobs=e.logprobs,
            advantages=[0.0] * len(e.completion_ids) if e.advantages is None else e.advantages,
            loss_mask=_loss_mask(e, settings),
            reward=_reward(e, settings),
            has_own_advantages=e.advantages is not None,
            episode=e.episode,
            seat=e.seat,
        )
        for e in scored(group)
    ]
    return TrainingGroup(group.prompt_ids, sequences, group.group_id, weight, is_replayed)


def scored(group: Group) -> list[Experience]:
    """Return the experiences of a group that are trained on."""
    return [e for e in group.experiences if e.reward is not None and e.finish_reason is not FinishReason.ABORT]


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
    """Return whether two episodes of a seat have different rewards, or one has advantages of its own."""
    sequences = training_group(group, settings).sequences
    own = any(any(s.advantages) for s in sequences if s.has_own_advantages)
    return own or len({(s.seat, s.reward) for s in sequences}) > len({s.seat for s in sequences})


def with_advantages(
    groups: Sequence[TrainingGroup], settings: TrainerSettings, reference: Sequence[TokenNumbers] | None = None
) -> list[TrainingGroup]:
    """Return the groups of a step with their advantages, by the formula that ADVANTAGE names.

    The formula sees each episode once, with the length of all its sequences together; its advantage is that of each of
    their tokens. A completion is an episode of one sequence. The episodes of each seat of a game are a group to the
    formula: the rewards of two seats have different means, since one of them begins.

    Args:
        groups: all groups of the step, because some formulas take statistics over the batch.
        settings: ADVANTAGE, ADVANTAGE_EPS and KL_COEF.
        reference: log-probabilities of the reference for each group, for KL in the reward. An episode's reward is
            then less by KL_COEF times the sum over its trained tokens of log(pi_behaviour / pi_reference): k1, whose
            gradient by way of the reward is that of KL(theta || reference) (arXiv:2501.03262, eq. 3).

    Raises:
        ConfigurationError: ADVANTAGE names a function that cannot be had, or that returns something else.
    """
    episodes = [(i, sequences) for i, group in enumerate(groups) for sequences in by_episode(group.sequences)]
    if not episodes:
        return list(groups)
    rewards = torch.tensor([sequences[0].reward for _, sequences in episodes], dtype=torch.float64)
    if reference is not None:
        logprobs = {
            id(s): sum(r) for g, rs in zip(groups, reference, strict=True) for s, r in zip(g.sequences, rs, strict=True)
        }
        distances = [
            sum(sum(s.trained(s.behaviour_logprobs)) - logprobs[id(s)] for s in sequences) for _, sequences in episodes
        ]
        rewards -= settings.kl_coef * torch.tensor(distances, dtype=torch.float64)
    seats = [(i, sequences[0].seat) for i, sequences in episodes]
    numbers = {seat: number for number, seat in enumerate(dict.fromkeys(seats))}
    outcomes = Outcomes(
        rewards=rewards,
        group_ids=torch.tensor([numbers[seat] for seat in seats]),
        lengths=torch.tensor([sum(s.trained_tokens for s in sequences) for _, sequences in episodes]),
        eps=settings.advantage_eps,
    )
    by_sequence = {
        id(s): advantage
        for (_, sequences), advantage in zip(episodes, advantage_function(settings)(outcomes).tolist(), strict=True)
        for s in sequences
    }
    return [replace(g, sequences=[_with_advantage(s, by_sequence[id(s)]) for s in g.sequences]) for g in groups]


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
                f"{len(outcomes.rewards)} completions or episodes"
            )
        return result

    return advantages


def _with_advantage(sequence: TrainingSequence, advantage: float) -> TrainingSequence:
    if sequence.has_own_advantages:
        return sequence
    return replace(sequence, advantages=[advantage] * len(sequence.completion_ids))
