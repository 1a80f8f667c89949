"""Policy losses, and the importance weights that correct for tokens sampled by another policy; pure functions.

``LOSS`` chooses a loss by its name. Losses are minimised. Policies: ``theta`` is the policy in training, ``behaviour``
the policy that sampled the tokens, by the engine's own log-probabilities, ``proximal`` the trainer's own policy at the
start of the step. ``rho`` is the ratio of theta's probability of a token to that of the old policy, with which the
step's tokens are compared (see loss.py).

Shapes: S completions with N trained tokens in all lie one after the other without padding. A tensor over tokens is
[N], a tensor over completions [S], and ``sequence_ids`` [N] (int64, 0 to S - 1) gives each token's completion.

Sources of the weights: truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training"), IcePop (Ling team 2025, arXiv:2510.18855), decoupled objective (Hilton et al. 2021,
arXiv:2110.00641; AReaL, Fu et al. 2025, arXiv:2505.24298), sequence-level weights and geometric rejection (Liu et al.
2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch"), off-policy sequence
mask (DeepSeek-AI 2025, arXiv:2512.02556, section 3.1).

Sources of the losses: PPO (Schulman et al. 2017, arXiv:1707.06347), DAPO (Yu et al. 2025, arXiv:2503.14476), dual clip
(Ye et al. 2019, arXiv:1912.09729), GSPO (Zheng et al. 2025, arXiv:2507.18071), CISPO (MiniMax 2025, arXiv:2506.13585;
its bound from Khatri et al. 2025, arXiv:2510.13786), SAPO (Gao et al. 2025, arXiv:2511.20347), DPPO (Qi et al. 2026,
arXiv:2602.04879).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.algorithm.methods import ImportanceCorrection

LOG_RATIO_LIMIT = 20.0
"""Largest absolute log ratio: larger ones are clamped before exp, so that one broken token cannot overflow the step."""

ICEPOP_LOW = 0.5
"""The smallest ratio that IcePop trains on; from the paper."""

SMALLEST_PROBABILITY = 1e-7
"""Distance from 0 and 1 within which a probability is moved, so that a divergence stays finite in float32."""

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


@dataclass(frozen=True)
class LossTokens:
    """The N trained tokens of S completions, as a policy loss sees them. Prompt tokens are not among them."""

    logprobs: Tensor
    """[N] float32, log pi_theta of the sampled tokens, with gradient."""
    old_logprobs: Tensor
    """[N] float32, log-probabilities of the policy in the ratio's denominator: the trainer's own at the start of the
    step, which with one update is theta; with IMPORTANCE_CORRECTION=none, the policy that sampled."""
    advantages: Tensor
    """[N] float32."""
    sequence_ids: Tensor
    """[N] int64, 0 to n_sequences - 1: the completion of each token."""
    n_sequences: int
    """S."""
    behaviour_logprobs: Tensor | None = None
    """[N] float32, log-probabilities of the policy that sampled, by the engine; None: those of ``old_logprobs``."""

    @property
    def ratio(self) -> Tensor:
        """Rho of each token, [N], with gradient."""
        return log_ratio(self.logprobs, self.old_logprobs).exp()


@dataclass(frozen=True)
class TokenLosses:
    """A policy loss by token, and what it reports."""

    losses: Tensor
    """[N], with gradient."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] each, numbers or bool: metrics of the step by name are their means over tokens."""


LossFunction = Callable[..., TokenLosses]
"""``loss(tokens: LossTokens, *, clip_low, clip_high, dual_clip)``, with those of the options that it has."""


def clipped(
    tokens: LossTokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> TokenLosses:
    """Return PPO's clipped loss, -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (arXiv:1707.06347, eq. 7).

    A ``clip_high`` above ``clip_low`` is DAPO's clip-higher (arXiv:2503.14476, section 3.1). With ``dual_clip`` c > 1,
    the loss of a token with negative advantage is at most -c A (arXiv:1912.09729, eq. 5).
    """
    losses, metrics = _clipped_losses(tokens.ratio, tokens.advantages, clip_low, clip_high)
    if dual_clip is not None:
        bounded = torch.minimum(losses, -dual_clip * tokens.advantages)
        losses = torch.where(tokens.advantages < 0, bounded, losses)
    return TokenLosses(losses, metrics)


def gspo(tokens: LossTokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLosses:
    """Return GSPO's loss: PPO's with one ratio a completion, exp(mean over its tokens of log rho).

    The equations are 5 and 7 of arXiv:2507.18071. Each token gets the value of its completion's ratio and the gradient
    of its own log-probability (eq. 14 and 15), so that after ``sequence_mean`` aggregation value and gradient equal
    those of the paper's objective. The mean keeps ratios close to 1, so the bounds are about a thousandth of PPO's.
    """
    log_ratios = (tokens.logprobs - tokens.old_logprobs).detach()
    mean = sequence_means(log_ratios, tokens.sequence_ids, tokens.n_sequences)[tokens.sequence_ids]
    log_rho = tokens.logprobs - tokens.logprobs.detach() + mean
    ratio = log_rho.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return TokenLosses(*_clipped_losses(ratio, tokens.advantages, clip_low, clip_high))


def cispo(tokens: LossTokens, *, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLosses:
    """Return CISPO's loss, -stopgrad(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi_theta (arXiv:2506.13585, eq. 4).

    The clip bounds the weight of a token, and no token loses its gradient. ``clip_low`` 1 leaves the lower side open,
    as the paper does; ``clip_high`` 4 bounds the weight by 5 (arXiv:2510.13786, section 3.2).
    """
    ratio = tokens.ratio.detach()
    below, above = ratio < 1 - clip_low, ratio > 1 + clip_high
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -weight * tokens.advantages * tokens.logprobs
    return TokenLosses(losses, {"clip_fraction_low": below, "clip_fraction_high": above})


def sapo(tokens: LossTokens, *, sharpness: float = 1.0, negative_sharpness: float = 1.05) -> TokenLosses:
    """Return SAPO's loss, -f(rho) A with the soft gate f(rho) = 4 / tau sigmoid(tau (rho - 1)).

    The equation is 6 of arXiv:2511.20347. tau is ``sharpness`` where A > 0 and ``negative_sharpness`` elsewhere. The
    gate's slope is 1 at rho = 1 and falls to 0 on both sides, where a clip would cut it off.
    """
    tau = torch.full_like(tokens.advantages, negative_sharpness).masked_fill(tokens.advantages > 0, sharpness)
    return TokenLosses(-4 / tau * torch.sigmoid(tau * (tokens.ratio - 1)) * tokens.advantages)


def dppo_tv(tokens: LossTokens, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLosses:
    """Return DPPO's loss, -M rho A, whose mask M bounds the total variation from the behaviour policy mu.

    M is 0 where A > 0 and pi - mu > clip_high, or A < 0 and pi - mu < -clip_low, else 1 (arXiv:2602.04879, binary TV).
    pi and mu are probabilities of the sampled token, so |pi - mu| is the total variation between "this token" and "any
    other". A rare token may change by a large ratio, and a likely one only by as much as its probability moves.
    """
    pi, mu = _probabilities(tokens)
    return _masked(tokens, too_low=pi - mu < -clip_low, too_high=pi - mu > clip_high)


def dppo_kl(tokens: LossTokens, *, clip_low: float = 0.05, clip_high: float = 0.05) -> TokenLosses:
    """Return DPPO's loss, -M rho A, whose mask M bounds the KL from the behaviour policy mu.

    With D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), M is 0 where A > 0, pi > mu and D > clip_high, or
    A < 0, pi < mu and D > clip_low, else 1 (arXiv:2602.04879, binary KL). A token that moves back towards mu is never
    masked.
    """
    pi, mu = _probabilities(tokens)
    divergence = mu * (mu.log() - pi.log()) + (1 - mu) * (torch.log1p(-mu) - torch.log1p(-pi))
    return _masked(tokens, too_low=(pi < mu) & (divergence > clip_low), too_high=(pi > mu) & (divergence > clip_high))


LOSS_FUNCTIONS: dict[str, LossFunction] = {f.__name__: f for f in (clipped, gspo, cispo, sapo, dppo_tv, dppo_kl)}


def _probabilities(tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """Return the probabilities [N] of the tokens under theta and under the policy that sampled, inside (0, 1)."""
    behaviour = tokens.old_logprobs if tokens.behaviour_logprobs is None else tokens.behaviour_logprobs
    pi, mu = (
        logprobs.detach().exp().clamp(SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
        for logprobs in (tokens.logprobs, behaviour)
    )
    return pi, mu


def _masked(tokens: LossTokens, *, too_low: Tensor, too_high: Tensor) -> TokenLosses:
    """Return -rho A without the tokens [N] that A would move further in the direction in which they are too far."""
    low, high = too_low & (tokens.advantages < 0), too_high & (tokens.advantages > 0)
    losses = torch.where(low | high, 0.0, -tokens.ratio * tokens.advantages)
    return TokenLosses(losses, {"clip_fraction_low": low, "clip_fraction_high": high})


def _clipped_losses(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's loss of each ratio [N], and which tokens the clip leaves without a gradient."""
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(-ratio * advantages, -bounded * advantages)
    below, above = (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0)
    return losses, {"clip_fraction_low": below, "clip_fraction_high": above}
