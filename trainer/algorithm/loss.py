"""From log-probabilities to a micro-batch's share of the step's loss, as the settings say, and what it tells of
itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.algorithm import grpo
from trainer.algorithm.methods import KLEstimator
from trainer.algorithm.packing import MicroBatch
from trainer.config import ImportanceCorrection, Loss, TrainerSettings


@dataclass(frozen=True)
class StepSize:
    """What the denominators of a step's loss count, over all ranks and micro-batches."""

    tokens: int
    sequences: int


@dataclass
class Diagnostics:
    """Sums and extremes over completion tokens; sums add up over micro-batches and ranks, extremes are maxima."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    signal: dict[str, float] = field(default_factory=dict)
    """By group id, the sum over its tokens of |importance weight * advantage|: how much it moves the policy."""

    def add(self, other: Diagnostics) -> None:
        """Takes another micro-batch in."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, -float("inf")), value)
        for name, value in other.signal.items():
            self.signal[name] = self.signal.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        """Means over tokens, and extremes, by metric name."""
        tokens = max(self.sums.get("tokens", 0.0), 1.0)
        means = {name: value / tokens for name, value in self.sums.items() if name not in ("tokens", "loss")}
        extremes = dict(self.maxima)
        if "negative_log_ratio_max" in extremes:
            extremes["ratio_min"] = float(torch.tensor(-extremes.pop("negative_log_ratio_max")).exp())
            extremes["ratio_max"] = float(torch.tensor(extremes.pop("log_ratio_max")).exp())
        return {"loss": self.sums.get("loss", 0.0), **means, **extremes}


def policy_loss(
    settings: TrainerSettings,
    batch: MicroBatch,
    logprobs: Tensor,
    entropies: Tensor,
    step: StepSize,
    *,
    proximal_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    off_policy: bool = False,
) -> tuple[Tensor, Diagnostics]:
    """The micro-batch's share of the step's loss.

    Args:
        settings: which loss, aggregation, correction and penalties.
        batch: the micro-batch, N completion tokens.
        logprobs: [N] float32, log pi_theta.
        entropies: [N] float32.
        step: the denominators.
        proximal_logprobs: [N], where the batch gets several updates; by default theta is the proximal policy.
        reference_logprobs: [N], needed where KL_COEF is not 0.
        off_policy: groups from the replay buffer: always the decoupled objective, times the groups' own weights.

    Returns:
        The loss, a scalar to call backward on, and diagnostics without gradient.
    """
    proximal = logprobs.detach() if proximal_logprobs is None else proximal_logprobs
    correction = settings.importance_correction
    if off_policy and correction is ImportanceCorrection.NONE:
        correction = ImportanceCorrection.TRUNCATED
    weights = _importance_weights(settings, correction, proximal, batch.behaviour_logprobs)
    denominator = batch.behaviour_logprobs if weights is None else proximal

    losses = _surrogate(settings, batch, logprobs, denominator)
    if weights is not None:
        losses = losses * weights
    losses = losses * batch.weights
    if settings.entropy_coef:
        losses = losses - settings.entropy_coef * entropies
    if reference_logprobs is not None:
        losses = losses + settings.kl_coef * grpo.kl_penalty(logprobs, reference_logprobs, settings.kl_estimator)
    loss = grpo.aggregate(
        losses,
        batch.sequence_ids,
        batch.n_sequences,
        settings.aggregation,
        step_tokens=step.tokens,
        step_sequences=step.sequences,
        constant_length=settings.max_new_tokens,
    )
    return loss, _diagnose(settings, batch, loss, logprobs, entropies, denominator, weights, reference_logprobs)


def _importance_weights(
    settings: TrainerSettings, correction: ImportanceCorrection, proximal: Tensor, behaviour: Tensor
) -> Tensor | None:
    match correction:
        case ImportanceCorrection.NONE:
            return None
        case ImportanceCorrection.TRUNCATED:
            return grpo.truncated_importance_weights(proximal, behaviour, settings.importance_cap)
        case ImportanceCorrection.ICEPOP:
            return grpo.icepop_weights(proximal, behaviour, settings.icepop_low, settings.icepop_high)


def _surrogate(settings: TrainerSettings, batch: MicroBatch, logprobs: Tensor, denominator: Tensor) -> Tensor:
    low, high, advantages = settings.clip_low, settings.clip_high, batch.advantages
    match settings.loss:
        case Loss.CLIPPED:
            return grpo.clipped_surrogate(logprobs, denominator, advantages, low, high, settings.dual_clip)
        case Loss.GSPO:
            return grpo.gspo_loss(logprobs, denominator, advantages, batch.sequence_ids, batch.n_sequences, low, high)
        case Loss.CISPO:
            return grpo.cispo_loss(logprobs, denominator, advantages, low, high)


@torch.no_grad()
def _diagnose(
    settings: TrainerSettings,
    batch: MicroBatch,
    loss: Tensor,
    logprobs: Tensor,
    entropies: Tensor,
    denominator: Tensor,
    weights: Tensor | None,
    reference_logprobs: Tensor | None,
) -> Diagnostics:
    if batch.is_filler or len(logprobs) == 0:
        return Diagnostics()
    log_ratio = grpo.log_ratio(logprobs, denominator)
    if settings.loss is Loss.GSPO:
        log_ratio = grpo.sequence_means(log_ratio, batch.sequence_ids, batch.n_sequences)[batch.sequence_ids]
    ratio = log_ratio.exp()
    below, above = ratio < 1 - settings.clip_low, ratio > 1 + settings.clip_high
    if settings.loss is not Loss.CISPO:  # whose weights are clipped whatever the advantage
        below, above = below & (batch.advantages < 0), above & (batch.advantages > 0)
    sums = {
        "loss": loss,
        "tokens": torch.full_like(loss, len(logprobs)),
        "entropy": entropies.sum(),
        # The tokens are the behaviour policy's, so KL(behaviour || theta) is what they estimate without bias.
        "kl_behaviour": grpo.kl_penalty(batch.behaviour_logprobs, logprobs, KLEstimator.K3).sum(),
        "clip_fraction_low": below.sum(),
        "clip_fraction_high": above.sum(),
    }
    if weights is not None:
        sums["importance_weight"] = weights.sum()
    if reference_logprobs is not None:
        sums["kl_reference"] = grpo.kl_penalty(logprobs, reference_logprobs, KLEstimator.K3).sum()
    maxima = {"log_ratio_max": log_ratio.max(), "negative_log_ratio_max": (-log_ratio).max()}
    weight = ratio if weights is None else weights
    by_sequence = torch.zeros(batch.n_sequences, device=weight.device)
    by_sequence.index_add_(0, batch.sequence_ids, (weight * batch.advantages).abs())
    result = Diagnostics(_numbers(sums), _numbers(maxima))
    for group_id, value in zip(batch.group_ids, by_sequence.tolist(), strict=True):
        result.signal[group_id] = result.signal.get(group_id, 0.0) + value
    return result


def _numbers(scalars: dict[str, Tensor]) -> dict[str, float]:
    """Brings scalars from the device in one go."""
    return dict(zip(scalars, torch.stack([x.double() for x in scalars.values()]).tolist(), strict=True))
