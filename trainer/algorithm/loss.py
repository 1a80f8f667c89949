"""The loss that the settings choose, from a micro-batch's log-probabilities, and its diagnostics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.algorithm import grpo
from trainer.algorithm.methods import KLEstimator
from trainer.algorithm.packing import MicroBatch
from trainer.config import ImportanceCorrection, Loss, TrainerSettings


@dataclass(frozen=True)
class StepSize:
    """The denominators of a step's loss: counts over all ranks and micro-batches."""

    tokens: int
    """Completion tokens."""
    sequences: int
    """Completions."""


@dataclass
class Diagnostics:
    """Sums and maxima over completion tokens, to be combined over micro-batches and ranks."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    signal: dict[str, float] = field(default_factory=dict)
    """Sum over a group's tokens of |importance weight * advantage|, by group id: the group's pull on the policy."""

    def add(self, other: Diagnostics) -> None:
        """Add another micro-batch."""
        add_up(self.sums, other.sums)
        add_up(self.signal, other.signal)
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, -float("inf")), value)

    def metrics(self) -> dict[str, float]:
        """Return means over tokens, the loss and extreme ratios, by metric name."""
        tokens = max(self.sums.get("tokens", 0.0), 1.0)
        means = {name: value / tokens for name, value in self.sums.items() if name not in ("tokens", "loss")}
        extremes = dict(self.maxima)
        if "negative_ratio_min" in extremes:
            extremes["ratio_min"] = -extremes.pop("negative_ratio_min")
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
    """Return a micro-batch's share of the step's loss, a scalar with gradient, and diagnostics without.

    Args:
        settings: the loss, its aggregation, correction and penalties.
        batch: the micro-batch, with N completion tokens.
        logprobs: [N] float32, log pi_theta.
        entropies: [N] float32, in nats.
        step: the denominators of the aggregation.
        proximal_logprobs: [N] float32, needed from the second optimizer step of a batch on. In the first, theta itself
            is the proximal policy.
        reference_logprobs: [N] float32, needed when KL_COEF is not 0.
        off_policy: the groups come from the replay buffer, so their loss is always the decoupled objective.
    """
    proximal = logprobs.detach() if proximal_logprobs is None else proximal_logprobs
    weights = _importance_weights(settings, proximal, batch.behaviour_logprobs, off_policy)
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
    settings: TrainerSettings, proximal: Tensor, behaviour: Tensor, off_policy: bool
) -> Tensor | None:
    """Return the decoupled objective's weights [N]; None when the ratio's denominator is the behaviour policy."""
    match settings.importance_correction:
        case ImportanceCorrection.ICEPOP:
            return grpo.icepop_weights(proximal, behaviour)
        case ImportanceCorrection.NONE if not off_policy:
            return None
        case _:
            return grpo.truncated_importance_weights(proximal, behaviour, settings.importance_cap)


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
    if settings.loss is not Loss.CISPO:  # CISPO clips weights whatever the sign of the advantage
        below, above = below & (batch.advantages < 0), above & (batch.advantages > 0)
    sums = {
        "loss": loss,
        "tokens": torch.full_like(loss, len(logprobs)),
        "entropy": entropies.sum(),
        # The behaviour policy sampled the tokens, so they estimate KL(behaviour || theta) without bias.
        "kl_behaviour": grpo.kl_penalty(batch.behaviour_logprobs, logprobs, KLEstimator.K3).sum(),
        "clip_fraction_low": below.sum(),
        "clip_fraction_high": above.sum(),
    }
    if weights is not None:
        sums["importance_weight"] = weights.sum()
    if reference_logprobs is not None:
        sums["kl_reference"] = grpo.kl_penalty(logprobs, reference_logprobs, KLEstimator.K3).sum()
    maxima = {"ratio_max": ratio.max(), "negative_ratio_min": -ratio.min()}
    weight = ratio if weights is None else weights
    by_sequence = torch.zeros(batch.n_sequences, device=weight.device)
    by_sequence.index_add_(0, batch.sequence_ids, (weight * batch.advantages).abs())
    result = Diagnostics(_numbers(sums), _numbers(maxima))
    for group_id, value in zip(batch.group_ids, by_sequence.tolist(), strict=True):
        add_up(result.signal, {group_id: value})
    return result


def add_up(totals: dict[str, float], values: Mapping[str, float]) -> None:
    """Add ``values`` to ``totals``, name by name."""
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + value


def _numbers(scalars: dict[str, Tensor]) -> dict[str, float]:
    """Return scalars as numbers, brought from the device in one transfer."""
    return dict(zip(scalars, torch.stack([x.double() for x in scalars.values()]).tolist(), strict=True))
