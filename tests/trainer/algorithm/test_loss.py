"""The settings choose the loss that they name: each is worked out here token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.core.errors import ConfigurationError
from tests.sequences import changed, trained_sequence
from tests.trainer.tiny import random_groups
from trainer.algorithm.loss import Diagnostics, StepSize
from trainer.algorithm.methods import Aggregation
from trainer.algorithm.packing import MicroBatch, TrainingGroup, pack
from trainer.algorithm.policy_losses import LossTokens, TokenLosses
from trainer.config import TrainerSettings
from trainer.config.objective import step_loss

STEP = StepSize(tokens=200, sequences=30)
"""Of which a micro-batch is a part."""

UNCORRECTED = {"importance_correction": "none"}
"""The clip is around the policy that sampled."""


@pytest.fixture
def batch() -> MicroBatch:
    return pack([replace(g, weight=0.5 + i / 4, is_replayed=i % 2 == 1) for i, g in enumerate(random_groups(0))])


def logprobs_near(batch: MicroBatch, seed: int, spread: float = 0.5) -> Tensor:
    noise = torch.randn(batch.targets.shape, generator=torch.Generator().manual_seed(seed))
    return (batch.behaviour_logprobs + spread * noise).clamp(max=-0.01)


def whole_loss(
    batch: MicroBatch, theta: Tensor, entropies: Tensor, settings: dict[str, Any], **inputs: Any
) -> tuple[Tensor, Diagnostics]:
    return step_loss(TrainerSettings.load(**settings))(batch, theta, entropies, STEP, **inputs)


def loss_of(batch: MicroBatch, theta: Tensor, settings: dict[str, Any], **inputs: Any) -> tuple[float, Tensor]:
    """Return the loss and its gradient with respect to theta's log-probabilities."""
    theta = theta.clone().requires_grad_()
    entropies = inputs.pop("entropies", torch.zeros_like(theta))
    loss, _ = whole_loss(batch, theta, entropies, settings, **inputs)
    loss.backward()
    assert theta.grad is not None
    return loss.item(), theta.grad


def by_hand(batch: MicroBatch, *inputs: Tensor, token_loss: Callable[..., float]) -> float:
    """Return the sum over tokens of ``token_loss`` of inputs, behaviour, advantage and group weight."""
    columns = [*inputs, batch.behaviour_logprobs, batch.advantages, batch.weights]
    return math.fsum(token_loss(*token) for token in zip(*(c.tolist() for c in columns), strict=True))


def clip(ratio: float, low: float = 0.2, high: float = 0.2) -> float:
    return min(max(ratio, 1 - low), 1 + high)


def correction_weight(name: str, log_ratio: float, cap: float = 2.0) -> float:
    ratio = math.exp(log_ratio)
    return {"none": 1.0, "truncated": min(ratio, cap), "icepop": ratio if 0.5 <= ratio <= 5 else 0.0}[name]


def test_without_a_correction_the_clip_is_around_the_behaviour_policy(batch: MicroBatch) -> None:
    theta = logprobs_near(batch, 1, spread=1.0)

    def token_loss(new: float, behaviour: float, advantage: float, weight: float) -> float:
        ratio = math.exp(new - behaviour)
        return -min(ratio * advantage, clip(ratio) * advantage) * weight

    loss, gradient = loss_of(batch, theta, UNCORRECTED)
    assert loss == pytest.approx(by_hand(batch, theta, token_loss=token_loss) / STEP.tokens, rel=1e-5)
    ratio = (theta - batch.behaviour_logprobs).exp()
    clipped = ((ratio > 1.2) & (batch.advantages > 0)) | ((ratio < 0.8) & (batch.advantages < 0))
    assert clipped.any()
    assert gradient[clipped].abs().max() == 0


@pytest.mark.parametrize("name", ["clipped", "gspo", "sapo"])
@pytest.mark.parametrize("correction", ["truncated", "icepop"])
def test_with_one_update_the_weight_alone_corrects_a_stale_token(batch: MicroBatch, correction: str, name: str) -> None:
    """The proximal policy is theta itself, so no bound of a ratio takes a token's gradient away."""
    theta = logprobs_near(batch, 1, spread=1.0)
    settings = {"loss": name, "aggregation": "token_mean", "importance_correction": correction}
    _, gradient = loss_of(batch, theta, settings)
    distances = (theta - batch.behaviour_logprobs).tolist()
    weights = torch.tensor([correction_weight(correction, distance) for distance in distances])
    expected = -weights * batch.advantages * batch.weights / STEP.tokens
    torch.testing.assert_close(gradient, expected)


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


@pytest.mark.parametrize("is_decoupled", [False, True])
def test_cispo_bounds_the_weight_of_a_stale_token_by_itself(batch: MicroBatch, is_decoupled: bool) -> None:
    theta, proximal = logprobs_near(batch, 1, spread=1.0), logprobs_near(batch, 2, spread=1.0)
    settings = {"loss": "cispo", "updates_per_batch": 2 if is_decoupled else 1}
    _, gradient = loss_of(batch, theta, settings, **({"proximal_logprobs": proximal} if is_decoupled else {}))
    behaviour = batch.behaviour_logprobs
    weight = (theta - (proximal if is_decoupled else behaviour)).exp().clamp(max=5.0)
    if is_decoupled:
        weight = weight * (proximal - behaviour).exp().clamp(max=2.0)
    assert ((theta - behaviour).exp() > 2).any()
    torch.testing.assert_close(gradient, -weight * batch.advantages * batch.weights / STEP.tokens)


def test_another_correction_takes_the_place_of_cispos_weight(batch: MicroBatch) -> None:
    """In a step of one update; IcePop leaves out tokens whose ratio is out of bounds."""
    theta = logprobs_near(batch, 1, spread=1.0)
    _, gradient = loss_of(batch, theta, {"loss": "cispo", "importance_correction": "icepop"})
    ratio = (theta - batch.behaviour_logprobs).exp()
    weight = torch.where((ratio >= 0.5) & (ratio <= 5), ratio, 0.0)
    assert 0 < (weight == 0).sum() < len(weight)
    torch.testing.assert_close(gradient, -weight * batch.advantages * batch.weights / STEP.tokens)


def test_stale_tokens_are_corrected_unless_the_settings_say_otherwise(batch: MicroBatch) -> None:
    theta = logprobs_near(batch, 1, spread=1.0)
    loss, gradient = loss_of(batch, theta, {})
    assert loss == loss_of(batch, theta, {"importance_correction": "truncated"})[0]
    _, uncorrected = loss_of(batch, theta, {"importance_correction": "none"})
    bound = 2.0 * (batch.advantages * batch.weights).abs() / STEP.tokens
    assert (gradient.abs() <= bound * 1.0001).all()
    assert (uncorrected.abs() > bound * 1.0001).any()


def test_completions_that_the_policy_left_behind_can_be_left_out(batch: MicroBatch) -> None:
    theta = batch.behaviour_logprobs - 0.5
    _, gradient = loss_of(batch, theta, {"off_policy_max_kl": 0.4, "clip_low": 1.0})
    _, plain = loss_of(batch, theta, {"off_policy_max_kl": 0.6, "clip_low": 1.0})
    negative = batch.advantages < 0
    assert gradient[negative].abs().max() == 0
    assert plain[negative].abs().min() > 0
    torch.testing.assert_close(gradient[~negative], plain[~negative])


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


def test_kl_to_the_reference_is_weighted_like_the_token_it_is_measured_at(batch: MicroBatch) -> None:
    theta, reference = logprobs_near(batch, 1), logprobs_near(batch, 2)
    d = (reference - theta).double()
    ratio = (theta - batch.behaviour_logprobs).double().exp().clamp(max=2.0)
    kl = (batch.weights * ratio * (d.exp() - d - 1)).sum().item()
    without, plain = loss_of(batch, theta, {})
    loss, gradient = loss_of(batch, theta, {"kl_coef": 0.1}, reference_logprobs=reference)
    assert loss - without == pytest.approx(0.1 * kl / STEP.tokens, rel=1e-4)
    torch.testing.assert_close(
        (gradient - plain).double(), -0.1 * batch.weights * ratio * d / STEP.tokens, rtol=1e-3, atol=1e-7
    )


def test_the_entropy_bonus_lowers_the_loss(batch: MicroBatch) -> None:
    entropies = torch.rand(batch.targets.shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    theta = logprobs_near(batch, 1)
    without, _ = loss_of(batch, theta, {})
    loss, _ = loss_of(batch, theta, {"entropy_coef": 0.01}, entropies=entropies)
    expected = -0.01 * (entropies * batch.weights).sum().item() / STEP.tokens
    assert loss - without == pytest.approx(expected, rel=1e-4)
    assert entropies.grad is not None
    torch.testing.assert_close(entropies.grad, -0.01 * batch.weights / STEP.tokens)


def test_bounds_come_from_the_settings(batch: MicroBatch) -> None:
    theta = batch.behaviour_logprobs + math.log(1.5)
    settings: dict[str, Any] = UNCORRECTED | {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.25}

    def token_loss(new: float, behaviour: float, advantage: float, weight: float) -> float:
        ratio = math.exp(new - behaviour)
        surrogate = min(ratio * advantage, clip(ratio, 0.1, 0.3) * advantage)
        return -(max(surrogate, 1.25 * advantage) if advantage < 0 else surrogate) * weight

    loss, _ = loss_of(batch, theta, settings)
    assert loss == pytest.approx(by_hand(batch, theta, token_loss=token_loss) / STEP.tokens, rel=1e-5)


def test_bounds_and_mean_are_those_of_the_losss_paper_unless_set(batch: MicroBatch) -> None:
    theta = logprobs_near(batch, 1, spread=0.01)
    for loss, bounds, mean in (
        ("clipped", {"clip_low": 0.2, "clip_high": 0.2}, Aggregation.TOKEN_MEAN),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, Aggregation.SEQUENCE_MEAN),
        ("cispo", {"clip_low": 1.0, "clip_high": 4.0}, Aggregation.TOKEN_MEAN),
        ("sapo", {}, Aggregation.SEQUENCE_MEAN),
    ):
        chosen = {"loss": loss, "aggregation": mean.value, **bounds}
        assert loss_of(batch, theta, UNCORRECTED | {"loss": loss})[0] == loss_of(batch, theta, UNCORRECTED | chosen)[0]


# --- a loss of one's own ---------------------------------------------------------------------------------------------


def own_loss(tokens: LossTokens, *, clip_high: float = 1.0) -> TokenLosses:
    weight = tokens.ratio.detach().clamp(max=1 + clip_high)
    return TokenLosses(-weight * tokens.advantages * tokens.logprobs, {"weight": weight})


def wrong_loss(tokens: LossTokens) -> Tensor:
    return tokens.logprobs.sum()


def test_a_function_of_ones_own_is_a_loss_with_options_and_metrics(batch: MicroBatch) -> None:
    theta, own = logprobs_near(batch, 1), f"{__name__}:own_loss"
    loss, gradient = loss_of(batch, theta, {"loss": own, "clip_high": 0.5, "importance_correction": "none"})
    weight = (theta - batch.behaviour_logprobs).exp().clamp(max=1.5)
    torch.testing.assert_close(gradient, -weight * batch.advantages * batch.weights / STEP.tokens)
    metrics = diagnostics_of(batch, theta, UNCORRECTED | {"loss": own, "clip_high": 0.5}).metrics()
    assert metrics["weight"] == pytest.approx(weight[~batch.is_replayed].mean().item())
    decoupled = diagnostics_of(batch, theta, {"loss": own, "clip_high": 0.5}).metrics()
    assert decoupled["weight"] == 1, "with one update the denominator is the policy itself"
    assert math.isfinite(loss)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss": "no_such_module:loss"}, "LOSS is 'no_such_module:loss', which cannot be imported"),
        ({"loss": f"{__name__}:missing"}, "which cannot be imported"),
        ({"loss": f"{__name__}:STEP"}, "which is not a function"),
        ({"loss": f"{__name__}:own_loss", "dual_clip": 3.0}, "has no keyword argument dual_clip"),
        ({"loss": f"{__name__}:wrong_loss"}, "must return TokenLosses with one loss for each of"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_function_that_is_no_loss_is_refused(batch: MicroBatch, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        loss_of(batch, batch.behaviour_logprobs, settings)


# --- what an update says of itself -----------------------------------------------------------------------------------


def diagnostics_of(batch: MicroBatch, theta: Tensor, settings: dict[str, Any], **inputs: Any) -> Diagnostics:
    entropies = torch.full_like(theta, 0.25)
    return whole_loss(batch, theta, entropies, settings, **inputs)[1]


@pytest.mark.parametrize("prefix", ["", "replay_"])
def test_metrics_are_means_and_extremes_over_fresh_and_over_replayed_tokens(batch: MicroBatch, prefix: str) -> None:
    theta, reference = logprobs_near(batch, 1), logprobs_near(batch, 2)
    found = diagnostics_of(batch, theta, UNCORRECTED | {"kl_coef": 0.1}, reference_logprobs=reference).metrics()
    own = batch.is_replayed == (prefix == "replay_")
    metrics = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
    ratio = (theta - batch.behaviour_logprobs).double().exp()[own]
    d, advantages = (reference - theta).double()[own], batch.advantages[own]
    expected = {
        "entropy": 0.25,
        "ratio_min": ratio.min().item(),
        "ratio_max": ratio.max().item(),
        "clip_fraction_low": ((ratio < 0.8) & (advantages < 0)).double().mean().item(),
        "clip_fraction_high": ((ratio > 1.2) & (advantages > 0)).double().mean().item(),
        "kl_reference": (d.exp() - d - 1).mean().item(),
        "kl_behaviour": (ratio - ratio.log() - 1).mean().item(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert metrics["clip_fraction_low"] > 0


@pytest.mark.parametrize("name", ["clipped", "gspo", "cispo"])
def test_the_metrics_of_a_clip_are_absent_where_the_ratio_is_1(batch: MicroBatch, name: str) -> None:
    theta = logprobs_near(batch, 1, spread=1.0)
    metrics = diagnostics_of(batch, theta, {"loss": name}).metrics()
    assert ("clip_fraction_high" in metrics) is (name == "cispo"), "which compares with the behaviour policy"
    ratio = (theta - batch.behaviour_logprobs).exp()[~batch.is_replayed]
    assert metrics["ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-5), "of theta against behaviour"
    later = diagnostics_of(batch, theta, {"loss": name}, proximal_logprobs=logprobs_near(batch, 2)).metrics()
    assert "clip_fraction_high" in later
    assert later["ratio_max"] == metrics["ratio_max"]


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


def test_a_filler_says_nothing() -> None:
    assert diagnostics_of(pack([]), torch.zeros(1), {}) == Diagnostics()


def test_completions_without_tokens_have_a_loss_of_0() -> None:
    empty = pack([TrainingGroup([1], [trained_sequence([], [], [])])])
    loss, gradient = loss_of(empty, torch.tensor([]), {})
    assert loss == 0
    assert gradient.shape == (0,)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_broken_behaviour_logprob_shows_as_a_loss_that_is_not_finite(broken: float) -> None:
    sequence = changed(trained_sequence([2, 3], [-1.0, -1.0], [1.0, 1.0]), logprobs=[broken, -1.0])
    batch = pack([TrainingGroup([1], [sequence])])
    loss, _ = loss_of(batch, torch.tensor([-1.0, -1.0]), {})
    assert math.isfinite(loss) is (broken == -math.inf), "a ratio without bound is clamped, NaN is not hidden"
