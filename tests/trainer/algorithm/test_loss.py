"""The settings choose the loss that they name: each is worked out here token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.tiny import random_groups
from trainer.algorithm.loss import Diagnostics, StepSize, policy_loss
from trainer.algorithm.packing import MicroBatch, TrainingGroup, TrainingSequence, pack
from trainer.config import TrainerSettings

STEP = StepSize(tokens=200, sequences=30)
"""Of which a micro-batch is a part."""

CORRECTIONS = ["none", "truncated", "icepop"]


@pytest.fixture
def batch() -> MicroBatch:
    groups = random_groups(0)
    weighted = [
        TrainingGroup(
            g.prompt_ids,
            [TrainingSequence(s.completion_ids, s.behaviour_logprobs, s.advantage, 0.5 + i / 4) for s in g.sequences],
            g.group_id,
        )
        for i, g in enumerate(groups)
    ]
    return pack(weighted)


def logprobs_near(batch: MicroBatch, seed: int, spread: float = 0.5) -> Tensor:
    noise = torch.randn(batch.targets.shape, generator=torch.Generator().manual_seed(seed))
    return (batch.behaviour_logprobs + spread * noise).clamp(max=-0.01)


def loss_of(batch: MicroBatch, theta: Tensor, settings: dict[str, Any], **inputs: Any) -> tuple[float, Tensor]:
    """Return the loss and its gradient with respect to theta's log-probabilities."""
    theta = theta.clone().requires_grad_()
    entropies = inputs.pop("entropies", torch.zeros_like(theta))
    loss, _ = policy_loss(TrainerSettings.load(**settings), batch, theta, entropies, STEP, **inputs)
    loss.backward()
    assert theta.grad is not None
    return loss.item(), theta.grad


def by_hand(batch: MicroBatch, *inputs: Tensor, token_loss: Callable[..., float]) -> float:
    """Return the sum over tokens of ``token_loss`` of inputs, behaviour, advantage and group weight."""
    columns = [*inputs, batch.behaviour_logprobs, batch.advantages, batch.weights]
    return math.fsum(token_loss(*token) for token in zip(*(c.tolist() for c in columns), strict=True))


def clip(ratio: float, low: float = 0.2, high: float = 0.2) -> float:
    return min(max(ratio, 1 - low), 1 + high)


def correction_weight(name: str, log_ratio: float) -> float:
    ratio = math.exp(log_ratio)
    return {"none": 1.0, "truncated": min(ratio, 2.0), "icepop": ratio if 0.5 <= ratio <= 5 else 0.0}[name]


def test_without_correction_the_ratio_is_against_the_behaviour_policy(batch: MicroBatch) -> None:
    theta = logprobs_near(batch, 1)

    def token_loss(new: float, behaviour: float, advantage: float, weight: float) -> float:
        ratio = math.exp(new - behaviour)
        return -min(ratio * advantage, clip(ratio) * advantage) * weight

    loss, _ = loss_of(batch, theta, {"importance_correction": "none"})
    assert loss == pytest.approx(by_hand(batch, theta, token_loss=token_loss) / STEP.tokens, rel=1e-5)


@pytest.mark.parametrize("correction", ["truncated", "icepop"])
def test_the_decoupled_objective_clips_against_the_proximal_policy_and_weights_by_it(
    batch: MicroBatch, correction: str
) -> None:
    theta, proximal = logprobs_near(batch, 1), logprobs_near(batch, 2)

    def token_loss(new: float, prox: float, behaviour: float, advantage: float, weight: float) -> float:
        ratio = math.exp(new - prox)
        surrogate = min(ratio * advantage, clip(ratio) * advantage)
        return -correction_weight(correction, prox - behaviour) * surrogate * weight

    loss, _ = loss_of(batch, theta, {"importance_correction": correction}, proximal_logprobs=proximal)
    assert loss == pytest.approx(by_hand(batch, theta, proximal, token_loss=token_loss) / STEP.tokens, rel=1e-5)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_replayed_groups_are_always_corrected(batch: MicroBatch, correction: str) -> None:
    """With one update theta is the proximal policy: the gradient is that of importance-weighted policy gradient."""
    theta, used = logprobs_near(batch, 1, spread=1.0), "truncated" if correction == "none" else correction
    loss, gradient = loss_of(batch, theta, {"importance_correction": correction}, off_policy=True)

    def token_loss(new: float, behaviour: float, advantage: float, weight: float) -> float:
        return -correction_weight(used, new - behaviour) * advantage * weight / STEP.tokens

    assert loss == pytest.approx(by_hand(batch, theta, token_loss=token_loss), rel=1e-5)
    columns = (theta, batch.behaviour_logprobs, batch.advantages, batch.weights)
    expected = [token_loss(*token) for token in zip(*(c.tolist() for c in columns), strict=True)]
    torch.testing.assert_close(gradient, torch.tensor(expected), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("aggregation", "denominator"),
    [("token_mean", STEP.tokens), ("constant_length", STEP.sequences * 64)],
)
def test_denominators_are_the_steps_own(batch: MicroBatch, aggregation: str, denominator: float) -> None:
    theta = batch.behaviour_logprobs
    loss, _ = loss_of(batch, theta, {"aggregation": aggregation, "max_new_tokens": 64})
    assert loss == pytest.approx(-(batch.advantages * batch.weights).sum().item() / denominator, rel=1e-5)


def test_the_sequence_mean_counts_completions(batch: MicroBatch) -> None:
    first = [(batch.sequence_ids == s).nonzero()[0] for s in range(batch.n_sequences)]
    loss, _ = loss_of(batch, batch.behaviour_logprobs, {"aggregation": "sequence_mean"})
    total = sum((batch.advantages[i] * batch.weights[i]).item() for i in first)
    assert loss == pytest.approx(-total / STEP.sequences, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_to_the_reference_is_added_without_the_groups_weight(batch: MicroBatch, estimator: str) -> None:
    theta, reference = logprobs_near(batch, 1), logprobs_near(batch, 2)
    d = (reference - theta).double()
    kl = {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[estimator].sum().item()
    without, _ = loss_of(batch, theta, {})
    settings = {"kl_coef": 0.1, "kl_estimator": estimator}
    loss, _ = loss_of(batch, theta, settings, reference_logprobs=reference)
    assert loss - without == pytest.approx(0.1 * kl / STEP.tokens, rel=1e-4)


def test_the_entropy_bonus_lowers_the_loss(batch: MicroBatch) -> None:
    entropies = torch.rand(batch.targets.shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    theta = logprobs_near(batch, 1)
    without, _ = loss_of(batch, theta, {})
    loss, _ = loss_of(batch, theta, {"entropy_coef": 0.01}, entropies=entropies)
    assert loss - without == pytest.approx(-0.01 * entropies.sum().item() / STEP.tokens, rel=1e-4)
    assert entropies.grad is not None
    torch.testing.assert_close(entropies.grad, torch.full_like(entropies, -0.01 / STEP.tokens))


@pytest.mark.parametrize("name", ["clipped", "gspo", "cispo"])
def test_on_policy_every_loss_has_the_policy_gradient(batch: MicroBatch, name: str) -> None:
    _, gradient = loss_of(batch, batch.behaviour_logprobs, {"loss": name})
    torch.testing.assert_close(gradient, -batch.advantages * batch.weights / STEP.tokens)


def test_bounds_come_from_the_settings(batch: MicroBatch) -> None:
    theta = batch.behaviour_logprobs + math.log(1.5)
    settings: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.25}

    def token_loss(new: float, behaviour: float, advantage: float, weight: float) -> float:
        ratio = math.exp(new - behaviour)
        surrogate = min(ratio * advantage, clip(ratio, 0.1, 0.3) * advantage)
        return -(max(surrogate, 1.25 * advantage) if advantage < 0 else surrogate) * weight

    loss, _ = loss_of(batch, theta, settings)
    assert loss == pytest.approx(by_hand(batch, theta, token_loss=token_loss) / STEP.tokens, rel=1e-5)


# --- what an update says of itself -----------------------------------------------------------------------------------


def diagnostics_of(batch: MicroBatch, theta: Tensor, settings: dict[str, Any], **inputs: Any) -> Diagnostics:
    entropies = torch.full_like(theta, 0.25)
    return policy_loss(TrainerSettings.load(**settings), batch, theta, entropies, STEP, **inputs)[1]


def test_metrics_are_means_and_extremes_over_tokens(batch: MicroBatch) -> None:
    theta, reference = logprobs_near(batch, 1), logprobs_near(batch, 2)
    metrics = diagnostics_of(batch, theta, {"kl_coef": 0.1}, reference_logprobs=reference).metrics()
    ratio = (theta - batch.behaviour_logprobs).double().exp()
    d = (reference - theta).double()
    expected = {
        "entropy": 0.25,
        "ratio_min": ratio.min().item(),
        "ratio_max": ratio.max().item(),
        "clip_fraction_low": ((ratio < 0.8) & (batch.advantages < 0)).double().mean().item(),
        "clip_fraction_high": ((ratio > 1.2) & (batch.advantages > 0)).double().mean().item(),
        "kl_reference": (d.exp() - d - 1).mean().item(),
        "kl_behaviour": (ratio - ratio.log() - 1).mean().item(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert metrics["clip_fraction_low"] > 0


def test_gspo_counts_as_clipped_what_its_sequence_ratio_clips(batch: MicroBatch) -> None:
    # Tokens of a completion far from 1 in both directions, which a ratio a token would clip, and their mean does not.
    signs = torch.where(torch.arange(len(batch.targets)) % 2 == 0, 1.0, -1.0)
    even = torch.tensor([(batch.sequence_ids == s).sum() % 2 == 0 for s in batch.sequence_ids])
    theta = batch.behaviour_logprobs + torch.where(even, signs, 0.0)
    gspo = diagnostics_of(batch, theta, {"loss": "gspo"}).metrics()
    clipped = diagnostics_of(batch, theta, {"loss": "clipped"}).metrics()
    assert gspo["clip_fraction_low"] + gspo["clip_fraction_high"] == 0
    assert clipped["clip_fraction_low"] + clipped["clip_fraction_high"] > 0


def test_metrics_do_not_depend_on_how_the_step_is_cut() -> None:
    groups = random_groups(3)
    whole = pack(groups)
    theta = logprobs_near(whole, 1)
    together = diagnostics_of(whole, theta, {})
    parts, start = Diagnostics(), 0
    for group in groups:
        part = pack([group])
        parts.add(diagnostics_of(part, theta[start : start + len(part.targets)], {}))
        start += len(part.targets)
    assert parts.metrics() == pytest.approx(together.metrics(), rel=1e-5)
    assert parts.signal == pytest.approx(together.signal, rel=1e-5)


def test_the_signal_of_a_group_is_how_much_its_tokens_move_the_policy(batch: MicroBatch) -> None:
    theta = logprobs_near(batch, 1, spread=1.0)
    signal = diagnostics_of(batch, theta, {}, off_policy=True).signal
    weights = (theta - batch.behaviour_logprobs).exp().clamp(max=2.0)
    for group_id in set(batch.group_ids):
        own = torch.tensor([batch.group_ids[s] == group_id for s in batch.sequence_ids])
        expected = (weights * batch.advantages).abs()[own].sum().item()
        assert signal[group_id] == pytest.approx(expected, rel=1e-4)


def test_a_filler_says_nothing() -> None:
    assert diagnostics_of(pack([]), torch.zeros(1), {}) == Diagnostics()


def test_completions_without_tokens_have_a_loss_of_0() -> None:
    empty = pack([TrainingGroup([1], [TrainingSequence([], [], 1.0)])])
    loss, gradient = loss_of(empty, torch.tensor([]), {})
    assert loss == 0
    assert gradient.shape == (0,)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_broken_behaviour_logprob_shows_as_a_loss_that_is_not_finite(broken: float) -> None:
    batch = pack([TrainingGroup([1], [TrainingSequence([2, 3], [broken, -1.0], 1.0)])])
    loss, _ = loss_of(batch, torch.tensor([-1.0, -1.0]), {})
    assert math.isfinite(loss) is (broken == -math.inf), "a ratio without bound is clamped, NaN is not hidden"
