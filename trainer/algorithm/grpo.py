"""Group relative policy optimisation: the whole algorithm as pure functions on tensors.

Notation, as in the papers: a prompt has G completions with rewards r; theta is the policy in training, ``behaviour``
what sampled the tokens, ``proximal`` the trainer's own policy at the start of the step. N tokens of S completions are
packed one after the other without padding, so every token tensor is [N], and ``sequence_ids`` [N] (int64, values 0 to
S - 1) says to which completion a token belongs. Only completion tokens appear here, the end token among them; prompt
tokens never do. Losses are to be minimised.

Losses are per token; ``aggregate`` turns them into a scalar with a denominator which belongs to the whole step, over
all ranks and micro-batches, so that the sum over micro-batches is the step's loss however it was cut.

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
"""Log ratios are clamped to this absolute value before exp, so that one broken token cannot overflow the step."""


# --- rewards and advantages ------------------------------------------------------------------------------------------


def group_advantages(
    rewards: Tensor, group_ids: Tensor, method: AdvantageMethod = AdvantageMethod.GRPO, eps: float = 1e-4
) -> Tensor:
    """Advantage of each completion against the others of its group.

    - ``grpo``: (r - mean) / (std + eps), std with ddof = 1 (arXiv:2402.03300, section 4.1.2)
    - ``dr_grpo``: r - mean (arXiv:2503.20783, eq. 3)
    - ``rloo``: r - mean of the others = (G r - sum r) / (G - 1) (arXiv:2402.14740, eq. 7)

    An unscorable completion (reward NaN) takes no part in its group's statistics and gets 0. A group with fewer than
    two scored completions, or with equal rewards, gets 0 throughout.

    Args:
        rewards: [S] float, NaN where a completion could not be scored.
        group_ids: [S] int64, any values; equal values are one group.
        method: which baseline and scale.
        eps: added to the standard deviation (``grpo`` only).

    Returns:
        [S] advantages in the dtype of ``rewards``; computed in float64.
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
    """[S] bool: the completion is scored and its group has two different rewards. Compared exactly, so that rounding of
    a mean cannot make an advantage out of equal rewards."""
    scored = ~rewards.isnan()
    _, group = torch.unique(group_ids, return_inverse=True)
    n_groups = int(group.max()) + 1 if group.numel() else 0
    low = torch.full((n_groups,), torch.inf, dtype=rewards.dtype, device=rewards.device)
    high = -low
    low.scatter_reduce_(0, group, torch.where(scored, rewards, torch.inf), "amin")
    high.scatter_reduce_(0, group, torch.where(scored, rewards, -torch.inf), "amax")
    return scored & (low < high)[group]


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft punishment of completions that come near the length limit (DAPO, arXiv:2503.14476, eq. 13).

    0 up to ``max_length - buffer`` tokens, then linear down to -1 at ``max_length``, and -1 beyond.

    Args:
        lengths: [S] completion lengths in tokens.
        max_length: L_max in tokens.
        buffer: L_cache in tokens, at least 1.

    Returns:
        [S] float32, to be added to the rewards.
    """
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0).to(torch.float32)


# --- ratios and weights ----------------------------------------------------------------------------------------------


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """[N] log(pi / pi_old), clamped to +-LOG_RATIO_LIMIT. Gradient flows through ``logprobs`` only."""
    return (logprobs - old_logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def truncated_importance_weights(logprobs: Tensor, behaviour_logprobs: Tensor, cap: float = 2.0) -> Tensor:
    """[N] min(pi / pi_behaviour, cap), without gradient: what corrects for sampling by another policy or engine.

    The staleness-decoupled objective (arXiv:2110.00641, eq. 5; arXiv:2505.24298, eq. 5) is these weights, with the
    proximal policy for pi, times a loss whose ratio is against the proximal policy: the clip keeps theta near the
    trainer's own policy at the start of the step, the weight corrects for sampling by an older one.
    """
    return log_ratio(logprobs.detach(), behaviour_logprobs).exp().clamp(max=cap)


def icepop_weights(logprobs: Tensor, behaviour_logprobs: Tensor, low: float = 0.5, high: float = 5.0) -> Tensor:
    """[N] pi / pi_behaviour inside [low, high], else 0, without gradient: tokens on which trainer and engine disagree
    too much are left out rather than truncated (IcePop, arXiv:2510.18855)."""
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
    """PPO's pessimistic surrogate, -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (arXiv:1707.06347, eq. 7).

    ``clip_high`` above ``clip_low`` is DAPO's clip-higher. With ``dual_clip`` c > 1 the loss of a token with negative
    advantage is at most -c A (arXiv:1912.09729, eq. 5).

    Args:
        logprobs: [N] log pi_theta of the sampled tokens.
        old_logprobs: [N] log-probabilities of the policy in the ratio's denominator (behaviour or proximal).
        advantages: [N] the completion's advantage, repeated for its tokens.
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
        dual_clip: the constant c, or None.

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
    """GSPO: one ratio a completion, exp(mean over its tokens of log rho), clipped as PPO's (arXiv:2507.18071, eq. 5,
    7).

    Written per token with the sequence ratio's value and each token's own gradient (eq. 14-15), so that with
    ``sequence_mean`` aggregation value and gradient are those of the sequence objective. Its ratios lie close to 1:
    bounds are about a thousandth of PPO's.

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
    """CISPO: -stopgrad(clip(rho)) A log pi: no token loses its gradient, only its weight is bounded (arXiv:2506.13585,
    eq. 4). ``clip_low`` of 1 leaves the lower side open.

    Returns:
        [N] losses.
    """
    weight = log_ratio(logprobs.detach(), old_logprobs).exp().clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator = KLEstimator.K3) -> Tensor:
    """Per-token estimate of KL(theta || reference), with d = log pi_ref - log pi.

    k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1 (Schulman 2020; GRPO, arXiv:2402.03300, eq. 4, uses k3).

    Returns:
        [N]; k2 and k3 are never negative.
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
    """[S] mean over each completion's tokens; 0 for a completion without tokens."""
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
    """This micro-batch's share of the step's loss.

    - ``token_mean``: sum over tokens / step_tokens (DAPO, arXiv:2503.14476, eq. 8)
    - ``sequence_mean``: sum over completions of the mean over tokens / step_sequences (GRPO, arXiv:2402.03300, eq. 3)
    - ``constant_length``: sum over tokens / (step_sequences * constant_length) (Dr. GRPO, arXiv:2503.20783, appendix)

    The denominators count the whole step, all ranks and micro-batches, so the shares add up to the same loss however
    the step is cut. A constant length is the configured maximum, never the padded width, which depends on the batch.

    Args:
        token_losses: [N].
        sequence_ids: [N] int64, 0 to n_sequences - 1. A completion is never split over micro-batches.
        n_sequences: S, completions in this micro-batch.
        method: which mean.
        step_tokens: completion tokens in the whole step.
        step_sequences: completions in the whole step.
        constant_length: the maximum completion length in tokens.

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
