"""From rewards and the critic's values to each token's advantage and return (ADVANTAGE=gae)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch

from trainer.algorithm.gae import explained_variance, generalized_advantages, value_targets, whitened
from trainer.algorithm.packing import TrainingGroup, TrainingSequence
from trainer.algorithm.training_groups import TokenNumbers, flags, kl_terms, spread
from trainer.config import TrainerSettings


def with_critic_targets(
    groups: Sequence[TrainingGroup],
    settings: TrainerSettings,
    values: Sequence[TokenNumbers],
    reference: Sequence[TokenNumbers] | None = None,
) -> list[TrainingGroup]:
    """Return the groups of a step with a whitened advantage, a return and a value for each trained token.

    A completion's reward is the reward of its last token, and an episode's that of the last token of each of its
    sequences. Rewards of turns are those of the turns' last tokens. Advantages that came with a completion stay as they
    are.

    Args:
        groups: all groups of the step, over whose trained tokens the advantages are whitened.
        settings: GAMMA, GAE_LAMBDA, GAE_PER_TURN and KL_COEF.
        values: the critic's values of each group's trained tokens.
        reference: log-probabilities of the reference at these tokens, for KL in the reward. A token's reward is then
            less by KL_COEF log(pi_behaviour / pi_reference) (arXiv:1909.08593, eq. 2).
    """
    sequences = [s for group in groups for s in group.sequences]
    if not any(s.trained_tokens for s in sequences):
        return list(groups)
    value = [spread(s, own) for s, own in zip(sequences, chain(*values), strict=True)]
    reward = [_rewards(s) for s in sequences]
    rewards, old_values = (torch.tensor([*chain(*rows)], dtype=torch.float64) for rows in (reward, value))
    if reference is not None:
        rewards -= settings.kl_coef * torch.tensor([*chain(*kl_terms(sequences, reference))], dtype=torch.float64)
    lengths = torch.tensor([len(s.completion_ids) for s in sequences])
    loss_mask = torch.tensor([*chain(*(flags(s) for s in sequences))])
    advantages = generalized_advantages(
        rewards,
        old_values,
        torch.arange(len(sequences)).repeat_interleave(lengths),
        loss_mask,
        settings.gamma,
        settings.gae_lambda,
        per_turn=settings.gae_per_turn,
    )
    returns = value_targets(advantages, old_values).split(lengths.tolist())
    parts = zip(whitened(advantages, loss_mask).split(lengths.tolist()), returns, value, strict=True)
    found = (
        replace(s, advantages=s.advantages if s.has_own_advantages else a.tolist(), returns=r.tolist(), values=v)
        for s, (a, r, v) in zip(sequences, parts, strict=True)
    )
    return [replace(group, sequences=[next(found) for _ in group.sequences]) for group in groups]


def critic_metrics(groups: Sequence[TrainingGroup]) -> dict[str, float]:
    """Return the metrics of the values that the critic gave before the step, over trained tokens."""
    values, returns = (
        torch.tensor([x for g in groups for s in g.sequences for x in s.trained(getattr(s, name) or ())])
        for name in ("values", "returns")
    )
    if not len(values):
        return {}
    return {
        "value_mean": values.mean().item(),
        "return_mean": returns.mean().item(),
        "explained_variance": explained_variance(values, returns),
    }


def _rewards(sequence: TrainingSequence) -> list[float]:
    """Return the reward of each of L tokens."""
    rewards = [0.0] * len(sequence.completion_ids)
    if sequence.turns:
        for turn in sequence.turns:
            rewards[turn.end - 1] = turn.reward
    elif rewards:
        rewards[-1] = sequence.reward
    return rewards
