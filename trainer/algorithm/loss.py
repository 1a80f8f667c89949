"""The loss of a step's micro-batches: policy loss, penalties and the mean over tokens, with their metrics.

Sources: KL estimators (Schulman 2020, "Approximating KL divergence"), their gradients (Liu et al. 2025,
arXiv:2510.01555; DeepSeek-AI 2025, arXiv:2512.02556, section 3.1), GRPO (Shao et al. 2024, arXiv:2402.03300), Dr. GRPO
(Liu et al. 2025, arXiv:2503.20783), DAPO (Yu et al. 2025, arXiv:2503.14476), ScaleRL (Khatri et al. 2025,
arXiv:2510.13786).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from trainer.algorithm.gae import value_loss
from trainer.algorithm.methods import Aggregation, ImportanceCorrection
from trainer.algorithm.packing import MicroBatch
from trainer.algorithm.policy_losses import (
    CAPS,
    LOG_RATIO_LIMIT,
    LossFunction,
    LossTokens,
    TokenLosses,
    importance_weights,
    log_ratio,
    off_policy_mask,
    sequence_means,
)

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


def kl_penalty(
    logprobs: Tensor, reference_logprobs: Tensor, weights: Tensor, baselines: Tensor | float = 0.0
) -> Tensor:
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
        baselines: [N] numbers that the gradient subtracts from -d; they must not depend on the token.

    Returns:
        [N] in nats.
    """
    d = (reference_logprobs - logprobs).detach().clamp(-KL_LIMIT, KL_LIMIT)
    value = k3(logprobs.detach(), reference_logprobs.detach()).clamp(max=KL_LIMIT)
    return weights * (value - (d + baselines) * (logprobs - logprobs.detach()))


def aggregate(
    token_losses: Tensor, batch: MicroBatch, method: Aggregation, step: StepSize, constant_length: int
) -> Tensor:
    """Return this micro-batch's share of the step's loss.

    - ``token_mean``: sum over tokens / tokens of the step (DAPO, arXiv:2503.14476, eq. 8)
    - ``prompt_mean``: sum over groups of the mean over their tokens / groups (ScaleRL, arXiv:2510.13786, section 3.2)
    - ``sequence_mean``: sum over completions of the mean over tokens / completions (GRPO, arXiv:2402.03300, eq. 3)
    - ``constant_length``: sum over tokens / (completions * constant_length) (Dr. GRPO, arXiv:2503.20783, appendix)

    The denominators count the whole step, over all ranks and micro-batches. So the shares of the micro-batches add up
    to the same loss, however the step is cut. The constant length is MAX_NEW_TOKENS, or AGENT_MAX_TOKENS with
    ROLLOUT=agent, and not the longest completion of the batch, so that a token's weight does not depend on the other
    completions.

    Args:
        token_losses: [N].
        batch: the micro-batch. A group may lie in several, but a completion is never split.
        method: the mean to take.
        step: the denominators.
        constant_length: the largest possible completion length in tokens.

    Returns:
        A scalar.
    """
    if method is Aggregation.PROMPT_MEAN:
        token_losses = token_losses / batch.group_tokens
    elif method is Aggregation.SEQUENCE_MEAN:
        token_losses = sequence_means(token_losses, batch.sequence_ids, batch.n_sequences)
    length = constant_length if method is Aggregation.CONSTANT_LENGTH else 1
    return token_losses.sum() / (step.denominator(method) * length)


REPLAY_PREFIX = "replay_"
"""Prefix of the metrics of tokens from the replay buffer."""
TERMS = ("loss", "teacher_loss")
"""Sums that are means of the step already, because the shares of its micro-batches add up to them."""
CLIP_FRACTIONS = ("clip_fraction_low", "clip_fraction_high")
"""Metrics of the bounds of a ratio, which say nothing where the ratio is 1."""


Reduction = Callable[[dict[str, float]], dict[str, float]]
"""A reduction of numbers over the ranks, by name."""


@dataclass(frozen=True)
class StepSize:
    """The denominators of a step's loss: counts over all ranks and micro-batches."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """Completions with trained tokens."""
    taught: int = 0
    """Trained tokens that a teacher has scored."""
    groups: int = 0
    """Groups with trained tokens."""

    def __add__(self, other: StepSize) -> StepSize:
        return StepSize(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def denominator(self, method: Aggregation) -> int:
        """Return the count by which a mean of the step divides."""
        counts = {Aggregation.TOKEN_MEAN: self.tokens, Aggregation.PROMPT_MEAN: self.groups}
        return max(counts.get(method, self.sequences), 1)


UNDIVIDED = StepSize(tokens=1, sequences=1, taught=1, groups=1)
"""Denominators that leave sums as they are, while the size of the step is not known."""


@dataclass
class Diagnostics:
    """Sums and maxima over trained tokens, to be combined over micro-batches and ranks.

    They stay on the device, because the host would have to wait for their values.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    """Scalars, float64."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Scalars, float64."""

    def add(self, other: Diagnostics) -> None:
        """Add another micro-batch."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def metrics(self, total: Reduction = dict, maximum: Reduction = dict) -> dict[str, float]:
        """Return the loss, and by metric name means over tokens and extreme ratios; replayed tokens have a prefix.

        The host waits for the device.

        Args:
            total: adds numbers up over the ranks, by name.
            maximum: returns the largest of the ranks' numbers, by name.
        """
        scalars = [*self.sums.values(), *self.maxima.values()]
        numbers = iter(torch.stack(scalars).tolist() if scalars else [])
        sums, maxima = ({name: next(numbers) for name in part} for part in (self.sums, self.maxima))
        sums, maxima = total(sums), maximum(maxima)
        means = {}
        for name, value in sums.items():
            prefix = REPLAY_PREFIX if name.startswith(REPLAY_PREFIX) else ""
            if name not in (*TERMS, "tokens", f"{REPLAY_PREFIX}tokens"):
                means[name] = value / max(sums[f"{prefix}tokens"], 1.0)
        extremes = {name: -x if name.endswith("ratio_min") else x for name, x in maxima.items()}
        terms = {name: sums[name] for name in TERMS if name in sums}
        return {"loss": 0.0, **terms, **means, **extremes}


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a step's micro-batches: a policy loss, its correction, its mean, and the weights of further terms."""

    policy_loss: LossFunction
    correction: ImportanceCorrection
    aggregation: Aggregation
    constant_length: int
    """The largest possible completion length in tokens."""
    importance_cap: float | None = None
    """The largest importance weight or ratio; None: that of the correction's paper."""
    truncates_alone: bool = False
    """The policy loss truncates the ratio itself, and a step has one update."""
    may_clip_at_once: bool = False
    """The policy loss may clip while theta is still the proximal policy: its bounds are around the behaviour policy, or
    it is a function of the user's."""
    off_policy_max_kl: float | None = None
    """See ``off_policy_mask``; None: no completion is masked."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    value_coef: float = 0.0
    value_clip: float = 0.0
    """See ``value_loss`` in gae.py."""
    reward_weight: float = 1.0
    """The weight of the policy loss, whose advantages come from rewards."""
    teacher_coef: float = 0.0
    """The weight of the distance from the teacher; see ``teacher_loss``."""

    def __call__(
        self,
        batch: MicroBatch,
        logprobs: Tensor,
        entropies: Tensor,
        step: StepSize,
        *,
        proximal_logprobs: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
        values: Tensor | None = None,
        divergence: Tensor | None = None,
    ) -> tuple[Tensor, Diagnostics]:
        """Return a micro-batch's share of the step's loss, a scalar with gradient, and diagnostics without.

        Args:
            batch: the micro-batch, with N trained tokens.
            logprobs: [N] float32, log pi_theta.
            entropies: [N] float32, in nats.
            step: the denominators of the aggregation.
            proximal_logprobs: [N] float32, the trainer's own policy at the start of the step; without them, that is the
                policy as it is now.
            reference_logprobs: [N] float32, for a KL penalty in the loss.
            values: [N] float32, of a critic that shares the policy's model.
            divergence: a scalar, the sum over the taught tokens of their weighted divergences from the teacher; without
                it, the distance from the teacher is that of ``teacher_loss``.
        """
        theta, behaviour = logprobs.detach(), batch.behaviour_logprobs
        policy = self.corrected_loss(batch, logprobs, proximal_logprobs)
        losses = self.reward_weight * policy.losses
        if self.entropy_coef:
            losses = losses - self.entropy_coef * entropies
        # The behaviour policy sampled the tokens, so they estimate KL(behaviour || theta) without bias.
        metrics = {"entropy": entropies, "kl_behaviour": k3(behaviour, theta), **policy.metrics}
        if reference_logprobs is not None:
            losses = losses + self.kl_coef * kl_penalty(logprobs, reference_logprobs, _stale_weights(theta, behaviour))
            metrics["kl_reference"] = k3(theta, reference_logprobs)
        if values is not None:
            value = value_losses(batch, values, self.value_clip)
            losses, metrics = losses + self.value_coef * value.losses, {**metrics, **value.metrics}
        loss = aggregate(losses * batch.weights, batch, self.aggregation, step, self.constant_length)
        terms = {}
        if self.teacher_coef:
            distance = teacher_loss(batch, logprobs, step) if divergence is None else divergence / max(step.taught, 1)
            loss, terms = loss + self.teacher_coef * distance, {"teacher_loss": distance}
        return loss, _diagnose(batch, terms | {"loss": loss}, metrics, log_ratio(theta, behaviour).exp())

    def corrected_loss(self, batch: MicroBatch, logprobs: Tensor, proximal_logprobs: Tensor | None) -> TokenLosses:
        """Return the policy loss of each token, corrected for the policy that sampled it.

        The denominator of the loss's ratio is the proximal policy, and the weight of the proximal against the behaviour
        policy multiplies the loss: the decoupled objective (arXiv:2110.00641, eq. 5; arXiv:2505.24298, eq. 5). In the
        first update of a step the proximal policy is theta itself, so the ratio is 1 and no bound of the loss acts.

        The denominator is the behaviour policy without a correction, and with a loss that truncates the ratio itself,
        as CISPO does, in a step of one update. Then the ratio is the weight: another correction takes its place, and
        ``truncated`` does not truncate it once more.
        """
        theta, behaviour = logprobs.detach(), batch.behaviour_logprobs
        correction, proximal = self.correction, theta if proximal_logprobs is None else proximal_logprobs
        is_decoupled = correction is not ImportanceCorrection.NONE and not self.truncates_alone
        if self.truncates_alone and correction is ImportanceCorrection.TRUNCATED:
            correction = ImportanceCorrection.NONE
        old = proximal if is_decoupled else behaviour
        ids, n_sequences = batch.sequence_ids, batch.n_sequences
        policy = self.policy_loss(LossTokens(logprobs, old, batch.advantages, ids, n_sequences, behaviour))
        weights = importance_weights(correction, proximal, behaviour, ids, n_sequences, self.importance_cap)
        losses, metrics = policy.losses * weights, {"importance_weight": weights, **policy.metrics}
        if self.truncates_alone and correction is not ImportanceCorrection.NONE:
            losses = losses / log_ratio(theta, behaviour).exp()
        if old is theta and not self.may_clip_at_once:
            metrics = {name: value for name, value in metrics.items() if name not in CLIP_FRACTIONS}
        if self.off_policy_max_kl is not None:
            kept = off_policy_mask(theta, behaviour, batch.advantages, ids, n_sequences, self.off_policy_max_kl)
            losses, metrics["off_policy_fraction"] = losses * kept, ~kept
        return TokenLosses(losses, metrics)


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of a step's micro-batches that are learned as they are: the mean over tokens of -log pi_theta."""

    teacher_coef: float = 0.0

    def __call__(
        self, batch: MicroBatch, logprobs: Tensor, entropies: Tensor, step: StepSize, **_further: Tensor | None
    ) -> tuple[Tensor, Diagnostics]:
        """Return a micro-batch's share of the step's loss, and diagnostics; the arguments are those of PolicyLoss."""
        loss = -logprobs.sum() / max(step.tokens, 1)
        return loss, _diagnose(batch, {"loss": loss}, {"entropy": entropies})


def teacher_loss(batch: MicroBatch, logprobs: Tensor, step: StepSize) -> Tensor:
    """Return a micro-batch's share of the distance from the teacher: the mean of ``kl_penalty`` over the taught tokens.

    Each token has the gradient of its own KL(theta || teacher), the reverse KL, less the baseline of its sequence. The
    mean has a denominator of its own, so that tokens without a teacher do not weaken it, and its tokens do not weaken
    the policy loss.

    Args:
        batch: the micro-batch, with N trained tokens, of which a teacher has scored some or all.
        logprobs: [N] float32, log pi_theta, with gradient.
        step: the denominator of the mean.

    Returns:
        A scalar, in nats.
    """
    theta = logprobs.detach()
    teacher = torch.where(batch.teacher_logprobs.isnan(), theta, batch.teacher_logprobs)
    weights = _stale_weights(theta, batch.behaviour_logprobs)
    penalties = kl_penalty(logprobs, teacher, weights, batch.teacher_baselines)
    return (penalties * batch.weights).sum() / max(step.taught, 1)


def _stale_weights(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Return the weights [N] of ``kl_penalty``: min(pi_theta / pi_behaviour, 2)."""
    return log_ratio(logprobs, behaviour_logprobs).exp().clamp(max=CAPS[ImportanceCorrection.TRUNCATED])


def critic_loss(batch: MicroBatch, values: Tensor, step: StepSize, value_clip: float) -> tuple[Tensor, Diagnostics]:
    """Return a micro-batch's share of the loss of a critic by itself, a mean over tokens, and diagnostics.

    Args:
        batch: the micro-batch, with N trained tokens.
        values: [N] float32, with gradient.
        step: the denominator of the mean.
        value_clip: see ``value_loss`` in gae.py.
    """
    value = value_losses(batch, values, value_clip)
    loss = (value.losses * batch.weights).sum() / max(step.tokens, 1)
    return loss, _diagnose(batch, {"loss": loss}, value.metrics)


def value_losses(batch: MicroBatch, values: Tensor, value_clip: float) -> TokenLosses:
    """Return the critic's loss by token; see ``value_loss`` in gae.py."""
    losses, is_clipped = value_loss(values, batch.old_values, batch.returns, value_clip)
    return TokenLosses(losses, {"value_loss": losses, "value_clip_fraction": is_clipped})


@torch.no_grad()
def _diagnose(
    batch: MicroBatch, terms: Mapping[str, Tensor], metrics: Mapping[str, Tensor], ratio: Tensor | None = None
) -> Diagnostics:
    """Return ``terms``, sums of ``metrics`` [N] and extreme ratios, over fresh tokens and over replayed ones.

    Tokens are chosen by ``where``: to index with a mask, the host would have to wait for the number of tokens.
    """
    n_tokens = len(batch.targets)
    if batch.is_filler or n_tokens == 0:
        return Diagnostics()
    sums, maxima = {name: term.double() for name, term in terms.items()}, {}
    fresh = n_tokens - batch.n_replayed
    for prefix, chosen, count in (
        ("", ~batch.is_replayed, fresh),
        (REPLAY_PREFIX, batch.is_replayed, batch.n_replayed),
    ):
        if not count:
            continue
        sums[f"{prefix}tokens"] = torch.full_like(sums["loss"], count)
        sums |= {prefix + name: torch.where(chosen, values.double(), 0.0).sum() for name, values in metrics.items()}
        if ratio is not None:
            maxima[f"{prefix}ratio_max"] = torch.where(chosen, ratio, -torch.inf).max().double()
            maxima[f"{prefix}ratio_min"] = -torch.where(chosen, ratio, torch.inf).min().double()
    return Diagnostics(sums, maxima)
