"""Importance ratios and weights: pure functions that correct for tokens sampled by another policy.

Policies: ``theta`` is the policy in training, ``behaviour`` the policy that sampled the tokens, by the engine's own
log-probabilities, ``proximal`` the trainer's own policy at the start of the step.

Shapes: S completions with N trained tokens in all lie one after the other without padding. A tensor over tokens is
[N], a tensor over completions [S], and ``sequence_ids`` [N] (int64, 0 to S - 1) gives each token's completion.

Sources: truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training"), IcePop (Ling team 2025, arXiv:2510.18855), decoupled objective (Hilton et al. 2021, arXiv:2110.00641; AReaL,
Fu et al. 2025, arXiv:2505.24298), sequence-level weights and geometric rejection (Liu et al. 2025, "When speed kills
stability: demystifying RL collapse from the training-inference mismatch"), off-policy sequence mask (DeepSeek-AI 2025,
arXiv:2512.02556, section 3.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithm.methods import ImportanceCorrection

LOG_RATIO_LIMIT = 20.0
"""Largest absolute log ratio: larger ones are clamped before exp, so that one broken token cannot overflow the step."""

ICEPOP_LOW = 0.5
"""The smallest ratio that IcePop trains on; from the paper."""

CAPS = {
    ImportanceCorrection.NONE: float("inf"),
    ImportanceCorrection.TRUNCATED: 2.0,
    ImportanceCorrection.ICEPOP: 5.0,
    ImportanceCorrection.SEQUENCE: 2.0,
    ImportanceCorrection.GEOMETRIC: 1.001,
}
"""IMPORTANCE_CAP of each correction if it is unset; from their papers."""


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return log(pi / pi_old), [N], clamped to +-LOG_RATIO_LIMIT.

    Args:
        logprobs: [N] log pi; the gradient flows through these only.
        old_logprobs: [N] log pi_old.
    """
    return (logprobs - old_logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_means(values: Tensor, sequence_ids: Tensor, n_sequences: int) -> Tensor:
    """Return the mean of ``values`` [N] over each completion's tokens, [S]; 0 for a completion without tokens."""
    zeros = torch.zeros(n_sequences, dtype=values.dtype, device=values.device)
    totals = zeros.index_add(0, sequence_ids, values)
    counts = zeros.index_add(0, sequence_ids, torch.ones_like(values))
    return totals / counts.clamp(min=1)


@torch.no_grad()
def importance_weights(
    correction: ImportanceCorrection,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    sequence_ids: Tensor,
    n_sequences: int,
    cap: float | None = None,
) -> Tensor:
    """Return the weight of each token for having been sampled by the behaviour policy instead of pi; no gradient.

    With rho = pi / pi_behaviour of the token, and R the product of rho over its completion of L tokens:

    - ``none``: 1
    - ``truncated``: min(rho, cap) (Yao et al. 2025; arXiv:2505.24298, eq. 5)
    - ``icepop``: rho inside [0.5, cap], else 0 (arXiv:2510.18855)
    - ``sequence``: min(R, cap), the same for all tokens of the completion
    - ``geometric``: rho, truncated at 2, where R^(1/L) lies inside [1 / cap, cap]; 0 in every other completion

    Args:
        correction: the formula.
        logprobs: [N] log pi.
        behaviour_logprobs: [N] log pi_behaviour.
        sequence_ids: [N] int64, 0 to n_sequences - 1.
        n_sequences: S.
        cap: the largest weight or ratio; without it, that of the paper (CAPS).

    Returns:
        [N] float.
    """
    cap = CAPS[correction] if cap is None else cap
    ratios = log_ratio(logprobs, behaviour_logprobs)
    match correction:
        case ImportanceCorrection.NONE:
            return torch.ones_like(ratios)
        case ImportanceCorrection.TRUNCATED:
            return ratios.exp().clamp(max=cap)
        case ImportanceCorrection.ICEPOP:
            ratio = ratios.exp()
            return torch.where((ratio >= ICEPOP_LOW) & (ratio <= cap), ratio, 0)
        case ImportanceCorrection.SEQUENCE:
            totals = torch.zeros(n_sequences, dtype=ratios.dtype, device=ratios.device)
            totals.index_add_(0, sequence_ids, logprobs - behaviour_logprobs)
            return totals.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)[sequence_ids]
        case ImportanceCorrection.GEOMETRIC:
            mean = sequence_means(logprobs - behaviour_logprobs, sequence_ids, n_sequences).exp()
            is_kept = (mean >= 1 / cap) & (mean <= cap)
            truncated = ratios.exp().clamp(max=CAPS[ImportanceCorrection.TRUNCATED])
            return torch.where(is_kept[sequence_ids], truncated, 0)


@torch.no_grad()
def off_policy_mask(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    n_sequences: int,
    max_kl: float,
) -> Tensor:
    """Return False for tokens with negative advantage of completions that theta has moved too far from, [N] bool.

    The distance of a completion is the mean over its tokens of log(pi_behaviour / pi_theta) (arXiv:2512.02556, eq. 9).
    A policy learns from its own mistakes; mistakes that it would no longer make only disturb it.

    Args:
        logprobs: [N] log pi_theta.
        behaviour_logprobs: [N] log pi_behaviour.
        advantages: [N].
        sequence_ids: [N] int64, 0 to n_sequences - 1.
        n_sequences: S.
        max_kl: the largest distance, in nats a token.
    """
    distances = sequence_means(behaviour_logprobs - logprobs, sequence_ids, n_sequences)[sequence_ids]
    return (advantages >= 0) | (distances <= max_kl)
