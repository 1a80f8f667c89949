"""Advantages: pure functions from the rewards of a step's completions to the weight of each in the loss.

Each function takes the step's ``Outcomes``, S completions in groups, and returns [S] float64. ``ADVANTAGE`` chooses one
by its name. Generalised advantage estimation, which needs a critic, is in gae.py.

Sources: GRPO (Shao et al. 2024, arXiv:2402.03300), RLOO (Ahmadian et al. 2024, arXiv:2402.14740), Dr. GRPO (Liu et al.
2025, arXiv:2503.20783), REINFORCE++ (Hu 2025, arXiv:2501.03262), batch-level standard deviation (Liu et al. 2025,
arXiv:2508.08221), pass@k training with k = G (Tang et al. 2025, arXiv:2503.19595), MaxRL (Tajwar et al. 2026,
arXiv:2602.02710), GDPO (Liu et al. 2026, arXiv:2601.05242), RAE (Liu et al. 2025, arXiv:2506.24119), DAPO (Yu et al.
2025, arXiv:2503.14476).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

WHITENING_EPS = 1e-8
"""Added to a variance before its root is taken."""


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of a step: S scored completions, which belong to groups with a common prompt.

    An agent's episode counts as one completion, however many sequences it has. Each seat of a game has its own group.
    """

    rewards: Tensor
    """[S] float64, overlong penalty included, and the KL penalty unless it is subtracted afterwards."""
    group_ids: Tensor
    """[S] int64; completions with equal values form a group."""
    lengths: Tensor
    """[S] int64: tokens of each completion that are trained on."""
    eps: float = 1e-4
    """Added to standard deviations of groups and batches (ADVANTAGE_EPS)."""
    components: Mapping[str, Tensor] = field(default_factory=dict)
    """The parts of the rewards by the names of their functions, before weights: [S] float64, NaN where a function does
    not apply to the row."""
    seats: tuple[int, ...] = ()
    """The seat of a game that each completion played, S of them, -1 where there is none; empty: -1 for all."""
    are_replayed: tuple[bool, ...] = ()
    """Which completions come from the replay buffer, S of them; empty: none."""

    def of(self, chosen: Tensor) -> Outcomes:
        """Return the rewards, groups and lengths of the ``chosen`` [S] bool completions."""
        return Outcomes(self.rewards[chosen], self.group_ids[chosen], self.lengths[chosen], self.eps)

    def group_totals(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` [S] over each completion's group, [S] float64."""
        _, group = torch.unique(self.group_ids, return_inverse=True)
        totals = torch.zeros(len(values), dtype=torch.float64, device=values.device)
        return totals.index_add_(0, group, values.double())[group]

    @property
    def group_sizes(self) -> Tensor:
        """The number of completions in each completion's group, [S] float64."""
        return self.group_totals(torch.ones_like(self.rewards))

    @property
    def centred(self) -> Tensor:
        """Rewards less the mean of their group, [S] float64; exactly 0 in a group of equal rewards."""
        centred = self.rewards.double() - self.group_totals(self.rewards) / self.group_sizes
        return torch.where(has_reward_variance(self.rewards, self.group_ids), centred, 0)


class UnfitRewardsError(ValueError):
    """A formula has no meaning for the rewards of a step."""


AdvantageFunction = Callable[[Outcomes], Tensor]


def grpo(outcomes: Outcomes) -> Tensor:
    """Return (r - mean r) / (std r + eps) by group, std with ddof = 1 (arXiv:2402.03300, section 4.1.2)."""
    variance = outcomes.group_totals(outcomes.centred**2) / (outcomes.group_sizes - 1).clamp(min=1)
    return outcomes.centred / (variance.sqrt() + outcomes.eps)


def dr_grpo(outcomes: Outcomes) -> Tensor:
    """Return r - mean r by group (arXiv:2503.20783, eq. 3)."""
    return outcomes.centred


def rloo(outcomes: Outcomes) -> Tensor:
    """Return r - mean of the others' r = (r - mean r) G / (G - 1) by group of G (arXiv:2402.14740, eq. 7)."""
    sizes = outcomes.group_sizes
    return outcomes.centred * sizes / (sizes - 1).clamp(min=1)


def batch_std(outcomes: Outcomes) -> Tensor:
    """Return (r - mean r of the group) / (std r of the batch + eps), std with ddof = 1 (arXiv:2508.08221, section 4).

    A group of nearly equal rewards does not get large advantages, as it would by its own deviation.
    """
    return outcomes.centred / (_std(outcomes.rewards.double()) + outcomes.eps)


def reinforce(outcomes: Outcomes) -> Tensor:
    """Return rewards whitened over the tokens of the batch, without a group's baseline (arXiv:2501.03262, eq. 5)."""
    return _whitened(outcomes.rewards.double(), outcomes.lengths)


def reinforce_baseline(outcomes: Outcomes) -> Tensor:
    """Return r - mean r by group, whitened over the tokens of the batch (arXiv:2501.03262, section 3.3).

    Completions of a group with equal rewards keep 0 before whitening, and get what the mean of the batch makes of it.
    """
    return _whitened(outcomes.centred, outcomes.lengths)


def pass_at_k(outcomes: Outcomes) -> Tensor:
    """Return the best completion's lead over the second best of its group, and 0 for the others, k = G.

    The lead is what the best completion adds to the largest of G rewards, whose mean is pass@G for rewards of 0 and 1
    (arXiv:2503.19595, eq. 7). The first of several best completions is the best.
    """
    advantages = torch.zeros_like(outcomes.rewards, dtype=torch.float64)
    for group_id in outcomes.group_ids.unique():
        members = (outcomes.group_ids == group_id).nonzero().squeeze(1)
        if len(members) >= 2:
            first, second = outcomes.rewards[members].double().topk(2).values
            advantages[members[outcomes.rewards[members].argmax()]] = first - second
    return advantages


def maxrl(outcomes: Outcomes) -> Tensor:
    """Return (r - mean r) / mean r by group; 0 where no reward is positive (arXiv:2602.02710).

    With rewards of 0 and 1 the mean over a group is an unbiased estimate of the gradient of log p(right), truncated;
    docs/algorithm.md has the derivation. A prompt weighs 1 / p, so the rarer a right answer, the longer the step.

    Raises:
        UnfitRewardsError: a reward is negative, which could turn the sign of an advantage.
    """
    if len(outcomes.rewards) and (lowest := outcomes.rewards.min().item()) < 0:
        raise UnfitRewardsError(f"a reward is {lowest:g}; allowed are 0 and 1, and no number below 0")
    means = outcomes.group_totals(outcomes.rewards) / outcomes.group_sizes
    return torch.where(means > 0, outcomes.centred / means, 0)


def gdpo(outcomes: Outcomes, weights: Mapping[str, float] | None = None) -> Tensor:
    """Return the weighted sum of each component's (r - mean r) / (std r + eps) by group, whitened over the tokens.

    Each component is compared among the completions of a group to which it applies (arXiv:2601.05242, section 3). It
    adds 0 to the others, and to all where it is constant. Whitening is that of ``reinforce_baseline``.

    Args:
        outcomes: with components.
        weights: the weight of each component by name; without them, all components have weight 1.

    Raises:
        UnfitRewardsError: ``weights`` names a component that no reward has, although they have others.
    """
    there = outcomes.components
    weights = dict.fromkeys(there, 1.0) if weights is None else weights if there else {}
    if unknown := weights.keys() - there.keys():
        raise UnfitRewardsError(f"no reward has the component {min(unknown)!r}; there are {', '.join(sorted(there))}")
    sums = torch.zeros_like(outcomes.rewards, dtype=torch.float64)
    for name, weight in weights.items():
        values = there[name].double()
        applies = ~values.isnan()
        sums[applies] += weight * grpo(replace(outcomes, rewards=values).of(applies))
    return _whitened(sums, outcomes.lengths)


RAE_DECAY = 0.95
"""The weight of the past in a role's baseline; from the paper."""


def rae(outcomes: Outcomes, baselines: Mapping[int, float]) -> tuple[Tensor, dict[int, float]]:
    """Return r - b of each completion's role, and the baselines b after all of them (arXiv:2506.24119, section 3.3).

    The role is the seat of a game. The completions move their baselines one after the other, in the order of
    ``outcomes``: after r - b, the baseline is RAE_DECAY b + (1 - RAE_DECAY) r. Replayed completions do not move it.

    Args:
        outcomes: the completions of one environment, with seats.
        baselines: b by seat; 0 for a seat without one.
    """
    after, advantages = dict(baselines), []
    count = len(outcomes.rewards)
    seats, are_replayed = outcomes.seats or (-1,) * count, outcomes.are_replayed or (False,) * count
    for reward, seat, is_replayed in zip(outcomes.rewards.tolist(), seats, are_replayed, strict=True):
        baseline = after.get(seat, 0.0)
        advantages.append(reward - baseline)
        if not is_replayed:
            after[seat] = RAE_DECAY * baseline + (1 - RAE_DECAY) * reward
    return torch.tensor(advantages, dtype=torch.float64), after


ADVANTAGE_FUNCTIONS: dict[str, AdvantageFunction] = {
    f.__name__: f for f in (grpo, dr_grpo, rloo, batch_std, reinforce, reinforce_baseline, pass_at_k, maxrl, gdpo)
}


def has_reward_variance(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return which completions belong to a group with two different rewards, [S] bool.

    Rewards are compared exactly, so that the rounding of a mean cannot make an advantage out of equal rewards.

    Args:
        rewards: [S] float.
        group_ids: [S] int64; completions with equal values form a group.
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    low = torch.full((len(rewards),), torch.inf, dtype=rewards.dtype, device=rewards.device)
    high = -low
    low.scatter_reduce_(0, group, rewards, "amin")
    high.scatter_reduce_(0, group, rewards, "amax")
    return (low < high)[group]


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Return the soft penalty for completions close to the length limit (DAPO, arXiv:2503.14476, eq. 13).

    The penalty is 0 up to ``max_length - buffer`` tokens, falls linearly to -1 at ``max_length``, and stays there.

    Args:
        lengths: [S] int64, completion lengths in tokens.
        max_length: L_max in tokens.
        buffer: L_cache in tokens, at least 1.

    Returns:
        [S] float32 in [-1, 0]; add it to the rewards.
    """
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0).to(torch.float32)


def _std(values: Tensor) -> Tensor:
    return values.std() if len(values) > 1 else torch.zeros_like(values.sum())


def _whitened(values: Tensor, lengths: Tensor) -> Tensor:
    """Return ``values`` [S] with mean 0 and variance 1 (ddof = 1) over tokens: each value counts ``lengths`` times."""
    tokens = lengths.double()
    mean = (values * tokens).sum() / tokens.sum().clamp(min=1)
    variance = ((values - mean) ** 2 * tokens).sum() / (tokens.sum() - 1).clamp(min=1)
    return (values - mean) * torch.rsqrt(variance + WHITENING_EPS)
