"""Generalized advantage estimation (GAE) with a critic, the critic's loss, and groups with the critic's targets.

A completion is an episode. The state of a token is all that comes before it: prompt and earlier tokens. ``values``
holds the critic's estimate of the discounted sum of rewards from that state on. The episode ends after the last token,
so the state behind it has the value 0. Tokens that an environment wrote between two turns are observations: no policy
chose them, so they take no step, and the state after a turn's last token is that of the next sampled token.

Shapes are those of policy_losses.py: S completions with N tokens in all are packed one after the other, and
``sequence_ids`` [N] gives each token's completion. ``loss_mask`` [N] is True at sampled tokens, False at observations.

Sources: GAE (Schulman et al. 2016, arXiv:1506.02438), PPO (Schulman et al. 2017, arXiv:1707.06347), the clipped value
loss of its reference implementation (PPO2 in OpenAI's baselines; Engstrom et al. 2020, arXiv:2005.12729), whitened
advantages (Huang et al. 2024, arXiv:2403.17031), discounts that depend on the transition (White 2017,
arXiv:1609.01995).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.protocol.groups import TokenSequence, by_episode
from trainer.algorithm.packing import RETURNS, VALUES, TrainingGroup
from trainer.algorithm.training_groups import (
    Array,
    PerToken,
    kl_terms,
    reward_of,
    rewarded_turns,
    scatter,
    with_arrays,
)

WHITENING_EPS = 1e-8
"""Added to the variance of the advantages, as in verl."""


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    sequence_ids: Tensor,
    loss_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    turn_ids: Tensor | None = None,
) -> Tensor:
    """Return GAE's advantage of each sampled token (arXiv:1506.02438, eq. 16; arXiv:1707.06347, eq. 11 and 12).

        delta_t = r_t + gamma V_(t+1) - V_t        A_t = delta_t + gamma lam A_(t+1)

    t counts the sampled tokens of a completion; behind the last, V and A are 0. With ``lam`` 1, A is the Monte Carlo
    return minus V; with ``lam`` 0, it is delta. A reward at an observation belongs to the sampled token before it.

    With ``turn_ids``, gamma and lam are 1 within a turn, and apply from its last token to the next turn
    (arXiv:1609.01995). So a turn's first token has the advantage of an estimator whose actions are turns, and each
    further token its own value as baseline.

    Args:
        rewards: [N] float; usually 0 but at a completion's last token.
        values: [N] float, V of the state before each token; not read at observations.
        sequence_ids: [N] int64, ascending.
        loss_mask: [N] bool, True at sampled tokens.
        gamma: the discount of a step.
        lam: the weight of longer estimates, from 0 (one step) to 1 (the whole completion).
        turn_ids: [N] int64, the turn of each token, where a step is a turn; not read at observations.

    Returns:
        [N] in the dtype of ``rewards``, computed in float64; 0 at observations.
    """
    sampled = loss_mask.nonzero().squeeze(1)
    ids, value = sequence_ids[sampled], values[sampled].double()
    turns = None if turn_ids is None else turn_ids[sampled]
    reward = _credited(rewards.double(), sequence_ids, loss_mask, ids)
    deltas = reward + _once_a_step(gamma, ids, turns) * value.roll(-1) - value
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    advantages[sampled] = _backward_sums(deltas, _once_a_step(gamma * lam, ids, turns))
    return advantages.to(rewards.dtype)


def _once_a_step(factor: float, sequence_ids: Tensor, turn_ids: Tensor | None) -> Tensor:
    """Return the weight [M] of each token's successor: ``factor``, 1 within a turn, 0 at a completion's end."""
    factors = torch.full((len(sequence_ids),), factor, dtype=torch.float64)
    if turn_ids is not None:
        factors[:-1][turn_ids[1:] == turn_ids[:-1]] = 1.0
    factors[:-1][sequence_ids[1:] != sequence_ids[:-1]] = 0.0
    factors[-1:] = 0.0
    return factors


def _backward_sums(terms: Tensor, decays: Tensor) -> Tensor:
    """Return the solution [M] of x_t = terms_t + decays_t x_(t+1)."""
    sums, following = [], 0.0
    for term, decay in zip(reversed(terms.tolist()), reversed(decays.tolist()), strict=True):
        following = term + decay * following
        sums.append(following)
    return torch.tensor(sums[::-1], dtype=torch.float64)


def _credited(rewards: Tensor, sequence_ids: Tensor, loss_mask: Tensor, sampled_ids: Tensor) -> Tensor:
    """Return the rewards [M] of the M sampled tokens, each with those of the observations that follow it.

    A reward before a completion's first sampled token is left out, because no token of the completion could earn it.
    """
    latest = loss_mask.cumsum(0) - 1
    has_earned = latest >= 0
    has_earned[has_earned.clone()] = sampled_ids[latest[has_earned]] == sequence_ids[has_earned]
    return torch.zeros(len(sampled_ids), dtype=rewards.dtype).index_add_(0, latest[has_earned], rewards[has_earned])


def value_targets(advantages: Tensor, values: Tensor) -> Tensor:
    """Return the returns [N] that the critic is fitted to, A + V before whitening: TD(lambda)'s targets.

    Args:
        advantages: [N] from ``generalized_advantages``.
        values: [N] the values that the advantages were computed with.
    """
    return advantages + values


def whitened(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Return (A - mean A) / sqrt(var A + 1e-8) over all sampled tokens of the step (arXiv:2403.17031).

    Args:
        advantages: [N] of the whole step, over all its completions.
        loss_mask: [N] bool, True at sampled tokens.

    Returns:
        [N], 0 at observations; all 0 when there are fewer than two sampled tokens.
    """
    chosen = advantages[loss_mask]
    result = torch.zeros_like(advantages)
    if len(chosen) > 1:
        result[loss_mask] = (chosen - chosen.mean()) * (chosen.var() + WHITENING_EPS).rsqrt()
    return result


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the critic's loss, max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2, as PPO2 has it.

    A value that has moved by more than ``clip`` towards its return has no gradient (arXiv:2005.12729, section 3).

    Args:
        values: [N] V, with gradient.
        old_values: [N] V at the start of the step.
        returns: [N] R.
        clip: the largest move of a value in a step; 0: no bound, and the loss is (V - R)^2 / 2.

    Returns:
        losses [N] with gradient, and [N] bool: where the clipped term is the larger one.
    """
    losses = (values - returns).square()
    if not clip:
        return losses / 2, torch.zeros_like(losses, dtype=torch.bool)
    near = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return torch.maximum(losses, near) / 2, near > losses


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(R - V) / Var(R), the share of the returns' variance that the critic explains.

    It is 1 for a critic that knows every return, 0 for a constant, and below 0 for one worse than a constant.

    Args:
        values: [N] V of sampled tokens.
        returns: [N] R of the same tokens.

    Returns:
        The share; 0 when all returns are equal.
    """
    variance = returns.double().var(correction=0)
    if not variance > 0:
        return 0.0
    return float(1 - (returns.double() - values.double()).var(correction=0) / variance)


def with_critic_targets(
    groups: Sequence[TrainingGroup],
    values: Sequence[PerToken],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    is_per_turn: bool = False,
    reference: Sequence[PerToken] | None = None,
    kl_coef: float = 0.0,
) -> list[TrainingGroup]:
    """Return the groups of a step with a whitened advantage, a return and a value for each trained token.

    A completion's reward is the reward of its last token, and an episode's that of the last token of each of its
    sequences. Rewards of turns are those of the turns' last tokens. Advantages that came with a completion stay as they
    are.

    Args:
        groups: all groups of the step, over whose trained tokens the advantages are whitened.
        values: the critic's values of each group's trained tokens.
        gamma: see ``generalized_advantages``.
        lam: see ``generalized_advantages``.
        is_per_turn: a step of the estimator is a turn.
        reference: log-probabilities of the reference at these tokens, for KL in the reward. A token's reward is then
            less by ``kl_coef`` log(pi_behaviour / pi_reference) (arXiv:1909.08593, eq. 2), and that of a turn's last
            token also by the terms of the episode's turns in other sequences, up to the sequence's next turn.
        kl_coef: the weight of KL in the reward.
    """
    sequences = [s for group in groups for s in group.sequences]
    if not any(s.trained_tokens for s in sequences):
        return list(groups)
    value = [scatter(s, np.asarray(numbers)) for s, numbers in zip(sequences, chain(*values), strict=True)]
    rewards = _rewards_less_kl(groups, reference, kl_coef)
    old_values = torch.from_numpy(np.concatenate(value))
    lengths = [s.tokens for s in sequences]
    ids = torch.arange(len(sequences)).repeat_interleave(torch.tensor(lengths))
    loss_mask = torch.from_numpy(np.concatenate([s.mask for s in sequences]))
    turn_ids = torch.from_numpy(np.concatenate([_turn_ids(s) for s in sequences])) if is_per_turn else None
    advantages = generalized_advantages(rewards, old_values, ids, loss_mask, gamma, lam, turn_ids=turn_ids)
    returns = value_targets(advantages, old_values).split(lengths)
    parts = zip(whitened(advantages, loss_mask).split(lengths), returns, value, strict=True)
    updated = (
        with_arrays(s, advantages=a.numpy(), returns=r.numpy(), values=v)
        for s, (a, r, v) in zip(sequences, parts, strict=True)
    )
    return [replace(group, sequences=[next(updated) for _ in group.sequences]) for group in groups]


def critic_metrics(groups: Sequence[TrainingGroup]) -> dict[str, float]:
    """Return the metrics of the values that the critic gave before the step, over trained tokens."""
    values, returns = (
        torch.from_numpy(
            np.concatenate([[], *(s.trained(s.arrays[name]) for g in groups for s in g.sequences if name in s.arrays)])
        ).float()
        for name in (VALUES, RETURNS)
    )
    if not len(values):
        return {}
    return {
        "value_mean": values.mean().item(),
        "return_mean": returns.mean().item(),
        "explained_variance": explained_variance(values, returns),
    }


def _rewards_less_kl(groups: Sequence[TrainingGroup], reference: Sequence[PerToken] | None, kl_coef: float) -> Tensor:
    """Return the rewards of the tokens of all sequences, one after the other, less their KL terms."""
    sequences = [s for group in groups for s in group.sequences]
    rewards = torch.from_numpy(np.concatenate([_rewards(s) for s in sequences]))
    if reference is not None:
        terms = kl_terms(groups, reference)
        _add_elsewhere(groups, terms)
        rewards -= kl_coef * torch.from_numpy(np.concatenate([terms[id(s)] for s in sequences]))
    return rewards


def _rewards(sequence: TokenSequence) -> Array:
    """Return the reward of each of L tokens."""
    rewards = np.zeros(sequence.tokens)
    for turn in rewarded_turns(sequence) if sequence.tokens else ():
        rewards[turn.end - 1] = reward_of(turn)
    return rewards


def _turn_ids(sequence: TokenSequence) -> NDArray[np.int64]:
    """Return the turn of each of L tokens; without rewards of turns, a turn is a run of trained tokens."""
    begins = np.diff(sequence.mask, prepend=False) & sequence.mask
    if sequence.turns:
        begins = np.zeros(sequence.tokens, bool)
        begins[[turn.start for turn in sequence.turns]] = True
    return begins.cumsum()


def _add_elsewhere(groups: Sequence[TrainingGroup], terms: dict[int, Array]) -> None:
    """Add to the KL term of each turn's last token those of the episode's other sequences up to the next turn.

    So the terms of a sequence from a turn on sum to those of the episode from that turn on, as rewards of turns do.
    """
    for episode in (sequences for group in groups for sequences in by_episode(group.sequences) if len(sequences) > 1):
        parts = [
            (s, turn.number, sum(terms[id(s)][turn.start : turn.end].tolist()))
            for s in episode
            for turn in rewarded_turns(s)
        ]
        for s in (s for s in episode if s.tokens):
            turns = rewarded_turns(s)
            following = [turn.number for turn in turns[1:]]
            for turn, end in zip(turns, [*following, math.inf], strict=True):
                elsewhere = (kl for other, number, kl in parts if other is not s and turn.number <= number < end)
                terms[id(s)][turn.end - 1] += sum(elsewhere)
