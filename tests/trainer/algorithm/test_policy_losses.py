"""Every policy loss against its formula, written out here token by token in float64."""

from __future__ import annotations

import inspect
import math
import statistics
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.trainer.algorithm.formulas import clamped_ratio, gradient_of, loss_tokens, losses_by_formula
from tests.trainer.ragged import random_ragged
from trainer.algorithm.methods import LOSS_OPTIONS, LOSSES
from trainer.algorithm.policy_losses import (
    LOSS_FUNCTIONS,
    LossFunction,
    LossTokens,
    cispo,
    clipped,
    dppo_kl,
    dppo_tv,
    gspo,
    sapo,
    sequence_means,
)

SEEDS = range(5)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_that_can_be_chosen_has_its_function_and_its_options(name: str) -> None:
    parameters = inspect.signature(LOSS_FUNCTIONS[name]).parameters
    assert tuple(option for option in LOSS_OPTIONS if option in parameters) == LOSSES[name].options


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (1.0, 3.0)], ids=str)
def test_the_clipped_surrogate_is_the_formula(seed: int, clip: tuple[float, float]) -> None:
    low, high = clip
    batch = random_ragged(seed)

    def formula(new: float, old: float, advantage: float) -> float:
        ratio = clamped_ratio(new, old)
        return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)

    result = clipped(loss_tokens(batch), clip_low=low, clip_high=high).losses
    torch.testing.assert_close(result, losses_by_formula(batch, "old", formula), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_dual_clip_bounds_the_loss_of_tokens_with_negative_advantage(seed: int) -> None:
    batch = random_ragged(seed, spread=1.5)

    def formula(new: float, old: float, advantage: float) -> float:
        ratio = clamped_ratio(new, old)
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        return -max(surrogate, 3.0 * advantage) if advantage < 0 else -surrogate

    result = clipped(loss_tokens(batch), dual_clip=3.0).losses
    torch.testing.assert_close(result, losses_by_formula(batch, "old", formula), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(result, clipped(loss_tokens(batch)).losses)


def test_a_clipped_token_has_no_gradient_and_any_other_that_of_its_ratio() -> None:
    old = torch.zeros(6, dtype=torch.float64)
    theta = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.1, 30.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0, -1.0], dtype=torch.float64)
    ids = torch.zeros(6).long()
    gradient = gradient_of(lambda x: clipped(LossTokens(x, old, advantages, ids, 1)).losses, theta)
    expected = [0.0, math.exp(0.5), -math.exp(-0.5), 0.0, -2 * math.exp(0.1), 0.0]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    batch = random_ragged(0, shortest=3)
    tokens, loss = loss_tokens(batch, old="theta"), LOSS_FUNCTIONS[name]
    gradient = gradient_of(lambda x: loss(replace(tokens, logprobs=x)).losses, tokens.logprobs)
    torch.testing.assert_close(gradient, -tokens.advantages)


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_under_sequence_mean_is_the_sequence_objective_in_value_and_gradient(seed: int) -> None:
    batch = random_ragged(seed, spread=0.05, shortest=1, broken=False)
    old, advantages, ids = batch.packed("old"), batch.packed("advantage"), batch.sequence_ids
    low, high = 0.01, 0.02

    def objective(theta: Tensor) -> Tensor:
        """arXiv:2507.18071, eq. 5, a completion at a time."""
        total = torch.zeros((), dtype=torch.float64)
        for s in range(batch.n_sequences):
            own = ids == s
            ratio = ((theta[own] - old[own]).sum() / own.sum()).exp()
            advantage = advantages[own][0]
            total = total - torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        return total / batch.n_sequences

    def ours(theta: Tensor) -> Tensor:
        losses = gspo(loss_tokens(batch, theta), clip_low=low, clip_high=high).losses
        return sequence_means(losses, ids, batch.n_sequences).mean()

    theta = batch.packed("theta")
    torch.testing.assert_close(ours(theta), objective(theta), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient_of(ours, theta), gradient_of(objective, theta), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_is_the_formula_and_every_token_keeps_its_gradient(seed: int) -> None:
    batch = random_ragged(seed, spread=1.0)

    def weight(new: float, old: float) -> float:
        return min(max(clamped_ratio(new, old), 0.7), 1.3)

    loss = cispo(loss_tokens(batch), clip_low=0.3, clip_high=0.3).losses
    expected = losses_by_formula(batch, "old", lambda new, o, a: -weight(new, o) * a * new)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    gradient = gradient_of(
        lambda x: cispo(loss_tokens(batch, x), clip_low=0.3, clip_high=0.3).losses, batch.packed("theta")
    )
    expected = losses_by_formula(batch, "old", lambda new, o, a: -weight(new, o) * a)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_cispo_leaves_the_lower_side_open_by_default() -> None:
    tokens = LossTokens(torch.tensor([-3.0]), torch.tensor([-1.0]), torch.tensor([1.0]), torch.zeros(1).long(), 1)
    assert cispo(tokens).losses.item() == pytest.approx(math.exp(-2) * 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo_is_the_formula(seed: int) -> None:
    batch = random_ragged(seed, spread=1.0)

    def formula(new: float, old: float, advantage: float) -> float:
        tau = 1.0 if advantage > 0 else 1.05
        return -4 / tau / (1 + math.exp(-tau * (clamped_ratio(new, old) - 1))) * advantage

    result = sapo(loss_tokens(batch)).losses
    torch.testing.assert_close(result, losses_by_formula(batch, "old", formula), rtol=1e-12, atol=1e-12)


def is_masked(name: str, pi: float, mu: float, advantage: float, low: float, high: float) -> bool:
    """Return whether DPPO leaves a token out, by its definition (arXiv:2602.04879)."""
    if name == "dppo_tv":
        return pi - mu > high if advantage > 0 else mu - pi > low
    divergence = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    return divergence > high and pi > mu if advantage > 0 else divergence > low and pi < mu


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "low", "high"), [("dppo_tv", 0.1, 0.25), ("dppo_kl", 0.02, 0.1)])
def test_dppo_masks_by_the_change_of_the_probability_since_the_rollout(
    seed: int, name: str, low: float, high: float
) -> None:
    """The ratio is to the proximal policy, the mask to the policy that sampled."""
    batch = random_ragged(seed, n_sequences=40, spread=0.7, broken=False)
    theta, behaviour = batch.packed("theta").clamp(max=-1e-3), batch.packed("behaviour").clamp(max=-1e-3)
    tokens = replace(loss_tokens(batch, theta), behaviour_logprobs=behaviour)
    result = LOSS_FUNCTIONS[name](tokens, clip_low=low, clip_high=high)
    losses, masked = [], []
    columns = (theta, tokens.old_logprobs, behaviour, tokens.advantages)
    for new, old, sampled, advantage in zip(*(column.tolist() for column in columns), strict=True):
        masked.append(is_masked(name, math.exp(new), math.exp(sampled), advantage, low, high) and advantage != 0)
        losses.append(0.0 if masked[-1] else -clamped_ratio(new, old) * advantage)
    assert 0.02 < statistics.fmean(masked) < 0.9
    torch.testing.assert_close(result.losses, torch.tensor(losses, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    low_side, high_side = result.metrics["clip_fraction_low"], result.metrics["clip_fraction_high"]
    assert (low_side | high_side).tolist() == masked
    assert (tokens.advantages[low_side] < 0).all()
    assert (tokens.advantages[high_side] > 0).all()


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
def test_dppo_never_masks_what_moves_back_and_lets_rare_tokens_grow_by_any_ratio(loss: LossFunction) -> None:
    pi, mu = torch.tensor([0.9, 0.1, 0.01, 0.9, 0.1]), torch.tensor([0.1, 0.9, 1e-4, 0.1, 0.9])
    advantages = torch.tensor([-1.0, 1.0, 1.0, 1.0, -1.0])
    ids = torch.zeros(5).long()
    gradient = gradient_of(lambda x: loss(LossTokens(x, mu.log(), advantages, ids, 1)).losses, pi.log())
    torch.testing.assert_close(gradient, torch.tensor([9.0, -1 / 9, -100.0, 0.0, 0.0]), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("loss", "bounds"), [(dppo_tv, (0.2, 0.2)), (dppo_kl, (0.05, 0.05))])
def test_dppos_bounds_are_those_of_its_reproductions(loss: LossFunction, bounds: tuple[float, float]) -> None:
    batch = random_ragged(0, n_sequences=40, broken=False)
    tokens = loss_tokens(batch, batch.packed("theta").clamp(max=-1e-3), old="behaviour")
    explicit = loss(tokens, clip_low=bounds[0], clip_high=bounds[1])
    torch.testing.assert_close(loss(tokens).losses, explicit.losses)
    for changed in ({"clip_low": bounds[0] * 1.5}, {"clip_high": bounds[1] * 1.5}):
        assert not torch.equal(loss(tokens, **changed).losses, explicit.losses)


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
def test_dppo_is_finite_at_probabilities_of_0_and_1_in_float32(loss: LossFunction) -> None:
    theta = torch.tensor([0.0, -1e4, 1e-3, -1e-9], requires_grad=True)
    behaviour = torch.tensor([-1e4, 0.0, -1e-9, 1e-3])
    losses = loss(LossTokens(theta, behaviour, torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.zeros(4).long(), 1)).losses
    losses.sum().backward()
    assert losses[:2].tolist() == [0.0, 0.0]
    assert losses.isfinite().all()
    assert theta.grad is not None
    assert theta.grad.isfinite().all()


def test_a_broken_token_cannot_overflow_the_step() -> None:
    theta, old = torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0])
    for loss in LOSS_FUNCTIONS.values():
        assert loss(LossTokens(theta, old, torch.tensor([-1.0, -1.0]), torch.tensor([0, 1]), 2)).losses.isfinite().all()


def test_no_gradient_flows_through_old_policies() -> None:
    for loss in LOSS_FUNCTIONS.values():
        theta = torch.tensor([-1.0, -2.0], requires_grad=True)
        old = torch.tensor([-1.5, -1.5], requires_grad=True)
        loss(LossTokens(theta, old, torch.ones(2), torch.tensor([0, 0]), 1)).losses.sum().backward()
        assert old.grad is None
        assert theta.grad is not None
