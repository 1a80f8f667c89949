"""The KL penalty of a token, and the mean that turns token losses into the loss of a step; pure functions.

Sources: KL estimators (Schulman 2020, "Approximating KL divergence"), their gradients (Liu et al. 2025,
arXiv:2510.01555; DeepSeek-AI 2025, arXiv:2512.02556, section 3.1), GRPO (Shao et al. 2024, arXiv:2402.03300), Dr. GRPO
(Liu et al. 2025, arXiv:2503.20783), DAPO (Yu et al. 2025, arXiv:2503.14476).
"""

from __future__ import annotations

from torch import Tensor

from trainer.algorithm.importance import LOG_RATIO_LIMIT, sequence_means
from trainer.algorithm.methods import Aggregation

KL_LIMIT = 10.0
"""Largest KL penalty of a token, and largest log ratio in its gradient: a token that theta has made 8,000 times as
likely as the reference would otherwise weigh as much as a batch."""


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return e^d - d - 1 with d = log pi_other - log pi at each token that pi sampled: an estimate of KL(pi || other).

    Args:
        logprobs: [N] log pi.
        other_logprobs: [N] log pi_other.

    Returns:
        [N] in nats, never negative (Schulman 2020).
    """
    d = (other_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return d.expm1() - d


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, weights: Tensor) -> Tensor:
    """Return the penalty for the distance from the reference: k3 in value, with the gradient of KL(theta || reference).

    With d = log pi_ref - log pi_theta and w = pi_theta / pi_behaviour, the gradient of E_behaviour[w k3(d)], taken
    through w, is E_behaviour[-w d grad log pi_theta]: that of KL(theta || reference) (arXiv:2512.02556, eq. 8), and
    that of k2 = d^2 / 2 under the weight w. The gradient of k3 alone is that of the reversed KL, and that of k1 is 0 on
    average (arXiv:2510.01555). So a token's penalty has the value w k3, and the gradient -w d grad log pi_theta; k3 and
    d are bounded by KL_LIMIT.

    Args:
        logprobs: [N] log pi_theta; the gradient flows through these only.
        reference_logprobs: [N] log pi_reference.
        weights: [N] importance weights w, without gradient. Truncate them, so that no stale token outweighs the others.

    Returns:
        [N] in nats.
    """
    d = (reference_logprobs - logprobs).detach().clamp(-KL_LIMIT, KL_LIMIT)
    value = k3(logprobs.detach(), reference_logprobs.detach()).clamp(max=KL_LIMIT)
    return weights * (value - d * (logprobs - logprobs.detach()))


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
    to the same loss, however the step is cut. The constant length is MAX_NEW_TOKENS, or AGENT_MAX_TOKENS with
    ROLLOUT=agent, and not the longest completion of the batch, so that a token's weight does not depend on the other
    completions.

    Args:
        token_losses: [N].
        sequence_ids: [N] int64, 0 to n_sequences - 1. A completion is never split over micro-batches.
        n_sequences: S, the completions in this micro-batch.
        method: the mean to take.
        step_tokens: trained tokens in the whole step.
        step_sequences: completions with trained tokens in the whole step.
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
