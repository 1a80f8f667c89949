"""Group relative policy optimisation (GRPO): the whole algorithm as pure functions on tensors.

A training step calls them in the order of this file:

1. ``group_advantages`` turns the rewards of each prompt's G completions into advantages.
2. ``truncated_importance_weights`` or ``icepop_weights`` weight the tokens that an older policy sampled.
3. ``clipped_surrogate`` (or ``gspo_loss``, ``cispo_loss``) gives each token a loss, to which ``kl_penalty`` adds the
   distance from the reference model.
4. ``aggregate`` adds the token losses up to the loss of the step.

Policies: ``theta`` is the policy in training, ``behaviour`` the policy that sampled the tokens, ``proximal`` the
trainer's own policy at the start of the step, ``reference`` the frozen starting model. ``rho`` is the ratio of theta's
probability of a token to that of the policy in the denominator. Losses are minimised.

Shapes: S completions with N tokens in all are packed one after the other without padding. So a tensor over tokens is
[N], a tensor over completions is [S], and ``sequence_ids`` [N] (int64, 0 to S - 1) gives each token's completion. Only
completion tokens appear here, the end token included; prompt tokens never do. Log-probabilities, losses and weights are
float32; advantages keep the dtype of the rewards.

Sources: GRPO (Shao et al. 2024, arXiv:2402.03300), PPO (Schulman et al. 2017, arXiv:1707.06347), RLOO (Ahmadian et al.
2024, arXiv:2402.14740), Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), DAPO (Yu et al. 2025, arXiv:2503.14476), dual
clip (Ye et al. 2019, arXiv:1912.09729), GSPO (Zheng et al. 2025, arXiv:2507.18071), CISPO (MiniMax 2025,
arXiv:2506.13585), KL estimators (Schulman 2020, "Approximating KL divergence"), truncated importance sampling (Yao et
al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"), IcePop (Ling team 2025,
arXiv:2510.18855), decoupled objective (Hilton et al. 2021, arXiv:2110.00641; AReaL, Fu et al. 2025, arXiv:2505.24298).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithm.methods import AdvantageMethod, Aggregation, KLEstimator

LOG_RATIO_LIMIT = 20.0
"""Largest absolute log ratio: larger ones are clamped before exp, so that one broken token cannot overflow the step."""


# --- rewards and advantages ------------------------------------------------------------------------------------------


def group_advantages(
    rewards: Tensor, group_ids: Tensor, method: AdvantageMethod = AdvantageMethod.GRPO, eps: float = 1e-4
) -> Tensor:
    """Return each completion's advantage over the other completions of its group.

    - ``grpo``: A = (r - mean r) / (std r + eps), std with ddof = 1 (arXiv:2402.03300, section 4.1.2)
    - ``dr_grpo``: A = r - mean r (arXiv:2503.20783, eq. 3)
    - ``rloo``: A = r - mean of the others' r = (G r - sum r) / (G - 1) (arXiv:2402.14740, eq. 7)

    A completion without a reward (NaN) is excluded from its group's statistics and gets advantage 0. All advantages of
    a group are 0 when fewer than two of its completions have a reward, or when all rewards are equal.

    Args:
        rewards: [S] float, NaN where a completion could not be scored.
        group_ids: [S] int64; completions with equal values form a group.
        method: the baseline and the scale.
        eps: added to the standard deviation (``grpo`` only).

    Returns:
        [S] advantages, computed in float64 and returned in the dtype of ``rewards``.
    """
    if rewards.numel() == 0:
        return rewards.clone()
    scored = ~rewards.isnan()
    values = torch.where(scored, rewards, 0).double()
    _, group = torch.unique(group_ids, return_inverse=True)
    n_groups = int(group.max()) + 1

    def total(x: Tensor) -> Tensor:
        return torch.zeros(n_groups, dtype=torch.float64, device=x.device).index_add_(0, group, x)

    count = total(scored.double())[group]
    mean = total(values)[group] / count.clamp(min=1)
    centred = torch.where(scored, values - mean, 0)
    others = (count - 1).clamp(min=1)
    match method:
        case AdvantageMethod.GRPO:
            std = (total(centred**2)[group] / others).sqrt()
            advantages = centred / (std + eps)
        case AdvantageMethod.DR_GRPO:
            advantages = centred
        case AdvantageMethod.RLOO:
            advantages = centred * count / others
    advantages = torch.where(has_reward_variance(rewards, group_ids), advantages, 0)
    return advantages.to(rewards.dtype)


def has_reward_variance(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return which completions have a reward and belong to a group with two different rewards.

    Rewards are compared exactly, so that the rounding of a mean cannot make an advantage out of equal rewards.

    Args:
        rewards: [S] float, NaN where a completion could not be scored.
        group_ids: [S] int64; completions with equal values form a group.

    Returns:
        [S] bool.
    """
    scored = ~rewards.isnan()
    _, group = torch.unique(group_ids, return_inverse=True)
    n_groups = int(group.max()) + 1 if group.numel() else 0
    low = torch.full((n_groups,), torch.inf, dtype=rewards.dtype, device=rewards.device)
    high = -low
    low.scatter_reduce_(0, group, torch.where(scored, rewards, torch.inf), "amin")
    high.scatter_reduce_(0, group, torch.where(scored, rewards, -torch.inf), "amax")
    return scored & (low < high)[group]


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


# --- ratios and weights ----------------------------------------------------------------------------------------------


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return log(pi / pi_old), [N], clamped to +-LOG_RATIO_LIMIT.

    Args:
        logprobs: [N] log pi; the gradient flows through these only.
        old_logprobs: [N] log pi_old.
    """
    return (logprobs - old_logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def truncated_importance_weights(logprobs: Tensor, behaviour_logprobs: Tensor, cap: float = 2.0) -> Tensor:
    """Return min(pi / pi_behaviour, cap), [N] without gradient: the correction for tokens that pi did not sample.

    The decoupled objective (arXiv:2110.00641, eq. 5; arXiv:2505.24298, eq. 5) takes the proximal policy for pi and
    multiplies these weights with a loss whose ratio has the proximal policy in its denominator. The clip then bounds
    how far theta moves in the step, and the weight corrects for the older policy, or other engine, that sampled.

    Args:
        logprobs: [N] log pi.
        behaviour_logprobs: [N] log pi_behaviour.
        cap: C, the largest weight.
    """
    return log_ratio(logprobs.detach(), behaviour_logprobs).exp().clamp(max=cap)


def icepop_weights(logprobs: Tensor, behaviour_logprobs: Tensor, low: float = 0.5, high: float = 5.0) -> Tensor:
    """Return pi / pi_behaviour where it lies in [low, high], else 0; [N] without gradient (IcePop, arXiv:2510.18855).

    Tokens on which trainer and engine disagree too much are left out instead of truncated.

    Args:
        logprobs: [N] log pi.
        behaviour_logprobs: [N] log pi_behaviour.
        low: the smallest ratio that counts; the default is the paper's.
        high: the largest ratio that counts; the default is the paper's.
    """
    ratio = log_ratio(logprobs.detach(), behaviour_logprobs).exp()
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0)


# --- policy losses, per token ----------------------------------------------------------------------------------------


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Return PPO's clipped loss, -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (arXiv:1707.06347, eq. 7).

    A ``clip_high`` above ``clip_low`` is DAPO's clip-higher (arXiv:2503.14476, section 3.1). With ``dual_clip`` c > 1,
    the loss of a token with negative advantage is at most -c A (arXiv:1912.09729, eq. 5).

    Args:
        logprobs: [N] log pi_theta of the sampled tokens.
        old_logprobs: [N] log-probabilities of the policy in the ratio's denominator (behaviour or proximal).
        advantages: [N] the completion's advantage, repeated for its tokens.
        clip_low: distance of the ratio's lower bound from 1.
        clip_high: distance of the ratio's upper bound from 1.
        dual_clip: the constant c, or None for no such bound.

    Returns:
        [N] losses.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    n_sequences: int,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Return GSPO's loss: PPO's with one ratio a completion, exp(mean over its tokens of log rho).

    The equations are 5 and 7 of arXiv:2507.18071. Each token gets the value of its completion's ratio and the gradient
    of its own log-probability (eq. 14 and 15), so that after ``sequence_mean`` aggregation value and gradient equal
    those of the paper's objective. The mean keeps ratios close to 1, so the bounds are about a thousandth of PPO's.

    Args:
        logprobs: [N] log pi_theta of the sampled tokens.
        old_logprobs: [N] log-probabilities of the policy in the ratio's denominator.
        advantages: [N] the completion's advantage, repeated for its tokens.
        sequence_ids: [N] int64, 0 to n_sequences - 1.
        n_sequences: S.
        clip_low: distance of the ratio's lower bound from 1.
        clip_high: distance of the ratio's upper bound from 1.

    Returns:
        [N] losses.
    """
    mean_log_ratio = sequence_means((logprobs - old_logprobs).detach(), sequence_ids, n_sequences)[sequence_ids]
    ratio = (logprobs - logprobs.detach() + mean_log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(-ratio * advantages, -clipped * advantages)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float = 1.0, clip_high: float = 0.28
) -> Tensor:
    """Return CISPO's loss, -stopgrad(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi_theta (arXiv:2506.13585, eq. 4).

    The clip bounds the weight of a token, and no token loses its gradient.

    Args:
        logprobs: [N] log pi_theta of the sampled tokens.
        old_logprobs: [N] log-probabilities of the policy in the ratio's denominator.
        advantages: [N] the completion's advantage, repeated for its tokens.
        clip_low: distance of the weight's lower bound from 1; 1 leaves the lower side open.
        clip_high: distance of the weight's upper bound from 1.

    Returns:
        [N] losses.
    """
    weight = log_ratio(logprobs.detach(), old_logprobs).exp().clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator = KLEstimator.K3) -> Tensor:
    """Return an estimate of KL(theta || reference) at each token that theta sampled.

    With d = log pi_reference - log pi_theta: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1 (Schulman 2020). GRPO uses k3
    (arXiv:2402.03300, eq. 4).

    Args:
        logprobs: [N] log pi_theta; the gradient flows through these only.
        reference_logprobs: [N] log pi_reference.
        estimator: k1, k2 or k3.

    Returns:
        [N] in nats; k2 and k3 are never negative.
    """
    d = (reference_logprobs.detach() - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case KLEstimator.K1:
            return -d
        case KLEstimator.K2:
            return d.square() / 2
        case KLEstimator.K3:
            return d.expm1() - d


# --- aggregation -----------------------------------------------------------------------------------------------------


def sequence_means(values: Tensor, sequence_ids: Tensor, n_sequences: int) -> Tensor:
    """Return the mean of ``values`` [N] over each completion's tokens, [S]; 0 for a completion without tokens."""
    zeros = torch.zeros(n_sequences, dtype=values.dtype, device=values.device)
    totals = zeros.index_add(0, sequence_ids, values)
    counts = zeros.index_add(0, sequence_ids, torch.ones_like(values))
    return totals / counts.clamp(min=1)


def aggregate(
    token_losses: Tensor,
    sequence_ids: Tensor,
    n_sequences: int,
    method: Aggregation,
    *,
    step_tokens: int,
    step_sequences: int,
    constant_length: int,
) -> Tensor:
    """Return this micro-batch's share of the step's loss.

    - ``token_mean``: sum over tokens / step_tokens (DAPO, arXiv:2503.14476, eq. 8)
    - ``sequence_mean``: sum over completions of the mean over tokens / step_sequences (GRPO, arXiv:2402.03300, eq. 3)
    - ``constant_length``: sum over tokens / (step_sequences * constant_length) (Dr. GRPO, arXiv:2503.20783, appendix)

    The denominators count the whole step, over all ranks and micro-batches. So the shares of the micro-batches add up
    to the same loss, however the step is cut. The constant length is MAX_NEW_TOKENS and not the longest completion of
    the batch, so that a token's weight does not depend on the other completions.

    Args:
        token_losses: [N].
        sequence_ids: [N] int64, 0 to n_sequences - 1. A completion is never split over micro-batches.
        n_sequences: S, the completions in this micro-batch.
        method: the mean to take.
        step_tokens: completion tokens in the whole step.
        step_sequences: completions in the whole step.
        constant_length: the largest possible completion length in tokens.

    Returns:
        A scalar.
    """
    match method:
        case Aggregation.TOKEN_MEAN:
            return token_losses.sum() / max(step_tokens, 1)
        case Aggregation.SEQUENCE_MEAN:
            return sequence_means(token_losses, sequence_ids, n_sequences).sum() / max(step_sequences, 1)
        case Aggregation.CONSTANT_LENGTH:
            return token_losses.sum() / (max(step_sequences, 1) * constant_length)
