"""From rewards and the critic's values to each token's advantage and return (ADVANTAGE=gae)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise

import torch

from services.protocol.groups import by_episode
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
            less by KL_COEF log(pi_behaviour / pi_reference) (arXiv:1909.08593, eq. 2), and that of a turn's last token
            also by the terms of the episode's turns in other sequences, up to the sequence's next turn.
    """
    sequences = [s for group in groups for s in group.sequences]
    if not any(s.trained_tokens for s in sequences):
        return list(groups)
    value = [spread(s, own) for s, own in zip(sequences, chain(*values), strict=True)]
    reward = [_rewards(s) for s in sequences]
    rewards, old_values = (torch.tensor([*chain(*rows)], dtype=torch.float64) for rows in (reward, value))
    if reference is not None:
        terms = kl_terms(groups, reference)
        _add_elsewhere(groups, terms)
        rewards -= settings.kl_coef * torch.tensor([*chain(*(terms[id(s)] for s in sequences))], dtype=torch.float64)
    lengths = torch.tensor([len(s.completion_ids) for s in sequences])
    turn_ids = torch.tensor([*chain(*map(_turn_ids, sequences))], dtype=torch.int64)
    loss_mask = torch.tensor([*chain(*(flags(s) for s in sequences))])
    advantages = generalized_advantages(
        rewards,
        old_values,
        torch.arange(len(sequences)).repeat_interleave(lengths),
        loss_mask,
        settings.gamma,
        settings.gae_lambda,
        turn_ids=turn_ids if settings.gae_per_turn else None,
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
    for turn in sequence.rewarded_turns if rewards else ():
        rewards[turn.end - 1] = turn.reward
    return rewards


def _turn_ids(sequence: TrainingSequence) -> list[int]:
    """Return the turn of each of L tokens; without rewards of turns, a turn is a run of trained tokens."""
    mask = flags(sequence)
    if sequence.turns:
        starts = {turn.start for turn in sequence.turns}
        return [*accumulate(place in starts for place in range(len(mask)))]
    return [*accumulate(now and not before for before, now in pairwise([False, *mask]))]


def _add_elsewhere(groups: Sequence[TrainingGroup], terms: dict[int, list[float]]) -> None:
    """Add to the KL term of each turn's last token those of the episode's other sequences up to the next turn.

    So the terms of a sequence from a turn on sum to those of the episode from that turn on, as rewards of turns do.
    """
    for episode in (sequences for group in groups for sequences in by_episode(group.sequences) if len(sequences) > 1):
        parts = [
            (s, turn.number, sum(terms[id(s)][turn.start : turn.end])) for s in episode for turn in s.rewarded_turns
        ]
        for s in filter(lambda s: s.completion_ids, episode):
            following = [turn.number for turn in s.rewarded_turns[1:]]
            for turn, end in zip(s.rewarded_turns, [*following, math.inf], strict=True):
                elsewhere = (kl for other, number, kl in parts if other is not s and turn.number <= number < end)
                terms[id(s)][turn.end - 1] += sum(elsewhere)
