"""Every function of the algorithm against its formula, written out here token by token in float64."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.ragged import Ragged, Rows, pack_rows, random_ragged
from trainer.algorithm import grpo
from trainer.algorithm.methods import AdvantageMethod, Aggregation, KLEstimator

SEEDS = range(5)
NAN = math.nan

# 1/3 and 0.1 have no exact mean, which is where equal rewards become an advantage by rounding.
rewards_of_a_group = st.lists(
    st.one_of(st.sampled_from([0.0, 1.0, 0.1, 1 / 3, NAN]), st.floats(-1e3, 1e3, allow_subnormal=False)),
    min_size=1,
    max_size=9,
)


def advantages_by_formula(rewards: list[float], method: AdvantageMethod, eps: float) -> list[float]:
    """Return one group's advantages, computed with the standard library's exact statistics."""
    scored = [r for r in rewards if not math.isnan(r)]
    if len(set(scored)) < 2:
        return [0.0] * len(rewards)
    mean = statistics.fmean(scored)

    def advantage(reward: float) -> float:
        match method:
            case AdvantageMethod.GRPO:
                return (reward - mean) / (statistics.stdev(scored) + eps)
            case AdvantageMethod.DR_GRPO:
                return reward - mean
            case AdvantageMethod.RLOO:
                return reward - (math.fsum(scored) - reward) / (len(scored) - 1)

    return [0.0 if math.isnan(r) else advantage(r) for r in rewards]


def losses_by_formula(batch: Ragged, old: str, loss: Callable[[float, float, float], float]) -> Tensor:
    """[N] ``loss(log pi, log pi_old, advantage)`` of every token."""
    rows: Rows = []
    for own, olds, advantages in zip(batch.rows["theta"], batch.rows[old], batch.rows["advantage"], strict=True):
        rows.append([loss(*token) for token in zip(own, olds, advantages, strict=True)])
    return pack_rows(rows)


def clamped_ratio(new: float, old: float) -> float:
    return math.exp(min(max(new - old, -20.0), 20.0))


def gradient_of(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """[N] derivative of the sum of ``loss``."""
    at = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(at).sum(), at)
    return gradient


def numerical_gradient_of(loss: Callable[[Tensor], Tensor], at: Tensor, width: float = 1e-6) -> Tensor:
    """[N] the same by central differences."""
    steps = torch.eye(len(at), dtype=at.dtype) * width
    return torch.stack([(loss(at + step).sum() - loss(at - step).sum()) / (2 * width) for step in steps])


# --- advantages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", list(AdvantageMethod))
@settings(max_examples=150, deadline=None, derandomize=True)
@given(groups=st.lists(rewards_of_a_group, min_size=1, max_size=5), shuffle=st.randoms(use_true_random=False))
def test_advantages_are_the_formula_whatever_the_order_and_numbering_of_groups(
    method: AdvantageMethod, groups: list[list[float]], shuffle: Any
) -> None:
    numbers = shuffle.sample(range(-50, 50), len(groups))
    rows = [
        (reward, number, expected)
        for number, group in zip(numbers, groups, strict=True)
        for reward, expected in zip(group, advantages_by_formula(group, method, 1e-4), strict=True)
    ]
    shuffle.shuffle(rows)
    rewards, ids, expected = zip(*rows, strict=True)
    result = grpo.group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids), method, 1e-4)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("method", list(AdvantageMethod))
@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 7, [1 / 3] * 3, [NAN, 1.0], [NAN, NAN], [0.3, NAN, 0.3]], ids=str)
def test_a_group_without_two_different_rewards_has_exactly_no_advantage(
    method: AdvantageMethod, rewards: list[float]
) -> None:
    for dtype in (torch.float32, torch.float64):
        result = grpo.group_advantages(torch.tensor(rewards, dtype=dtype), torch.zeros(len(rewards)).long(), method)
        assert result.tolist() == [0.0] * len(rewards)
        assert not grpo.has_reward_variance(torch.tensor(rewards, dtype=dtype), torch.zeros(len(rewards)).long()).any()


def test_an_unscorable_completion_neither_gets_nor_moves_an_advantage() -> None:
    with_nan = grpo.group_advantages(torch.tensor([1.0, NAN, 0.0, 0.0]), torch.zeros(4).long())
    without = grpo.group_advantages(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3).long())
    assert with_nan[1] == 0
    torch.testing.assert_close(with_nan[[0, 2, 3]], without)


@pytest.mark.parametrize("method", list(AdvantageMethod))
def test_no_completions_have_no_advantages(method: AdvantageMethod) -> None:
    empty = torch.tensor([])
    assert grpo.group_advantages(empty, empty.long(), method).shape == (0,)
    assert grpo.has_reward_variance(empty, empty.long()).shape == (0,)


def test_advantages_keep_the_dtype_and_small_differences_of_large_rewards() -> None:
    rewards = torch.tensor([1e6, 1e6 + 1, 1e6 + 2])
    result = grpo.group_advantages(rewards, torch.zeros(3).long(), eps=0.0)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.tensor([-1.0, 0.0, 1.0]))


def test_a_larger_eps_shrinks_only_grpo() -> None:
    rewards, ids = torch.tensor([0.0, 1.0]), torch.zeros(2).long()
    for method in AdvantageMethod:
        small, large = (grpo.group_advantages(rewards, ids, method, eps)[1] for eps in (1e-6, 1.0))
        assert bool(large < small) is (method is AdvantageMethod.GRPO)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(length=st.integers(0, 300), limit=st.integers(2, 200), share=st.floats(0.01, 1))
def test_the_overlong_penalty_falls_from_0_to_minus_1_over_the_buffer(length: int, limit: int, share: float) -> None:
    buffer = max(int(limit * share), 1)
    if length <= limit - buffer:
        expected = 0.0
    elif length <= limit:
        expected = (limit - buffer - length) / buffer
    else:
        expected = -1.0
    result = grpo.overlong_penalty(torch.tensor([length]), limit, buffer)
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(expected, abs=1e-6)


# --- losses per token ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (1.0, 3.0)], ids=str)
def test_the_clipped_surrogate_is_the_formula(seed: int, clip: tuple[float, float]) -> None:
    low, high = clip
    batch = random_ragged(seed)

    def formula(new: float, old: float, advantage: float) -> float:
        ratio = clamped_ratio(new, old)
        return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)

    result = grpo.clipped_surrogate(
        batch.packed("theta"), batch.packed("old"), batch.packed("advantage"), clip_low=low, clip_high=high
    )
    torch.testing.assert_close(result, losses_by_formula(batch, "old", formula), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_dual_clip_bounds_the_loss_of_tokens_with_negative_advantage(seed: int) -> None:
    batch = random_ragged(seed, spread=1.5)

    def formula(new: float, old: float, advantage: float) -> float:
        ratio = clamped_ratio(new, old)
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        return -max(surrogate, 3.0 * advantage) if advantage < 0 else -surrogate

    theta, old, advantage = batch.packed("theta"), batch.packed("old"), batch.packed("advantage")
    result = grpo.clipped_surrogate(theta, old, advantage, dual_clip=3.0)
    torch.testing.assert_close(result, losses_by_formula(batch, "old", formula), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(result, grpo.clipped_surrogate(theta, old, advantage))


def test_a_clipped_token_has_no_gradient_and_any_other_that_of_its_ratio() -> None:
    old = torch.zeros(6, dtype=torch.float64)
    theta = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.1, 30.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0, -1.0], dtype=torch.float64)
    gradient = gradient_of(lambda x: grpo.clipped_surrogate(x, old, advantages), theta)
    expected = [0.0, math.exp(0.5), -math.exp(-0.5), 0.0, -2 * math.exp(0.1), 0.0]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64))


def test_on_policy_every_loss_has_the_policy_gradient() -> None:
    batch = random_ragged(0, shortest=3)
    theta, advantages, ids = batch.packed("theta"), batch.packed("advantage"), batch.sequence_ids
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "clipped": lambda x: grpo.clipped_surrogate(x, theta, advantages),
        "gspo": lambda x: grpo.gspo_loss(x, theta, advantages, ids, batch.n_sequences),
        "cispo": lambda x: grpo.cispo_loss(x, theta, advantages),
    }
    for name, loss in losses.items():
        torch.testing.assert_close(gradient_of(loss, theta), -advantages, msg=name)


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
        losses = grpo.gspo_loss(theta, old, advantages, ids, batch.n_sequences, low, high)
        return aggregated(losses, batch, Aggregation.SEQUENCE_MEAN)

    theta = batch.packed("theta")
    torch.testing.assert_close(ours(theta), objective(theta), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient_of(ours, theta), gradient_of(objective, theta), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_gives_the_tokens_of_a_completion_one_ratio(seed: int) -> None:
    batch = random_ragged(seed)
    rows: Rows = []
    for own, olds, advantages in zip(batch.rows["theta"], batch.rows["old"], batch.rows["advantage"], strict=True):
        mean = statistics.fmean(x - y for x, y in zip(own, olds, strict=True)) if own else 0.0
        ratio = math.exp(mean)
        rows.append([-min(ratio * a, min(max(ratio, 1 - 3e-4), 1 + 4e-4) * a) for a in advantages])
    result = grpo.gspo_loss(
        batch.packed("theta"), batch.packed("old"), batch.packed("advantage"), batch.sequence_ids, batch.n_sequences
    )
    torch.testing.assert_close(result, pack_rows(rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_is_the_formula_and_every_token_keeps_its_gradient(seed: int) -> None:
    batch = random_ragged(seed, spread=1.0)

    def weight(new: float, old: float) -> float:
        return min(max(clamped_ratio(new, old), 0.7), 1.3)

    theta, old, advantages = batch.packed("theta"), batch.packed("old"), batch.packed("advantage")
    loss = grpo.cispo_loss(theta, old, advantages, clip_low=0.3, clip_high=0.3)
    expected = losses_by_formula(batch, "old", lambda new, o, a: -weight(new, o) * a * new)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    gradient = gradient_of(lambda x: grpo.cispo_loss(x, old, advantages, 0.3, 0.3), theta)
    expected = losses_by_formula(batch, "old", lambda new, o, a: -weight(new, o) * a)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_cispo_leaves_the_lower_side_open_by_default() -> None:
    loss = grpo.cispo_loss(torch.tensor([-3.0]), torch.tensor([-1.0]), torch.tensor([1.0]))
    assert loss.item() == pytest.approx(math.exp(-2) * 3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_kl_estimators_are_the_formulas_and_so_are_their_gradients(seed: int, estimator: KLEstimator) -> None:
    batch = random_ragged(seed)

    def formula(new: float, reference: float, _: float) -> float:
        d = reference - new
        return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[estimator.value]

    theta, reference = batch.packed("theta"), batch.packed("reference")
    result = grpo.kl_penalty(theta, reference, estimator)
    torch.testing.assert_close(result, losses_by_formula(batch, "reference", formula), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        gradient_of(lambda x: grpo.kl_penalty(x, reference, estimator), theta),
        numerical_gradient_of(lambda x: grpo.kl_penalty(x, reference, estimator), theta),
        rtol=1e-5,
        atol=1e-7,
    )
    if estimator is not KLEstimator.K1:
        assert (result >= 0).all()


def test_k3_of_nearly_equal_policies_is_not_lost_to_rounding() -> None:
    theta = torch.tensor([-1.0, -2.0])
    result = grpo.kl_penalty(theta, theta + 2e-3)
    torch.testing.assert_close(result, torch.full((2,), 2e-6), rtol=1e-2, atol=0)


def test_kl_estimators_average_to_the_divergence_of_two_distributions() -> None:
    """Exactly: k1 and k3 weighted by the policy's own probabilities."""
    policy, reference = (
        torch.randn(50, generator=torch.Generator().manual_seed(i), dtype=torch.float64).log_softmax(0) for i in (0, 1)
    )
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in (KLEstimator.K1, KLEstimator.K3):
        torch.testing.assert_close((policy.exp() * grpo.kl_penalty(policy, reference, estimator)).sum(), exact)


# --- importance weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_importance_weights_are_truncated_and_icepop_leaves_tokens_out(seed: int) -> None:
    batch = random_ragged(seed, spread=1.5)
    theta, behaviour = batch.packed("theta"), batch.packed("behaviour")
    truncated = grpo.truncated_importance_weights(theta, behaviour, cap=2.0)
    expected = losses_by_formula(batch, "behaviour", lambda new, old, _: min(math.exp(new - old), 2.0))
    torch.testing.assert_close(truncated, expected, rtol=1e-12, atol=1e-12)
    icepop = grpo.icepop_weights(theta, behaviour, 0.5, 5.0)
    expected = losses_by_formula(
        batch, "behaviour", lambda new, old, _: r if 0.5 <= (r := math.exp(new - old)) <= 5.0 else 0.0
    )
    torch.testing.assert_close(icepop, expected, rtol=1e-12, atol=1e-12)
    assert {0.0} < set(icepop.tolist()), "some token is left out, and some kept"


def test_no_gradient_flows_through_weights_or_old_policies() -> None:
    theta = torch.tensor([-1.0, -2.0], requires_grad=True)
    other = torch.tensor([-1.5, -1.5], requires_grad=True)
    assert not grpo.truncated_importance_weights(theta, other).requires_grad
    assert not grpo.icepop_weights(theta, other).requires_grad
    losses = grpo.clipped_surrogate(theta, other, torch.ones(2)) + grpo.kl_penalty(theta, other)
    losses.sum().backward()
    assert other.grad is None
    assert theta.grad is not None


def test_a_broken_token_cannot_overflow_the_step() -> None:
    theta, old = torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0])
    for result in (
        grpo.clipped_surrogate(theta, old, torch.tensor([-1.0, -1.0])),
        grpo.truncated_importance_weights(theta, old),
        grpo.icepop_weights(theta, old),
        grpo.kl_penalty(theta, old),
        grpo.gspo_loss(theta, old, torch.tensor([-1.0, -1.0]), torch.tensor([0, 1]), 2),
    ):
        assert result.isfinite().all()


# --- aggregation -----------------------------------------------------------------------------------------------------


def aggregated(losses: Tensor, batch: Ragged, method: Aggregation) -> Tensor:
    """Aggregate losses of a step that consists of this batch alone."""
    return grpo.aggregate(
        losses,
        batch.sequence_ids,
        batch.n_sequences,
        method,
        step_tokens=sum(batch.lengths),
        step_sequences=batch.n_sequences,
        constant_length=17,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", list(Aggregation))
def test_aggregations_are_the_formulas(seed: int, method: Aggregation) -> None:
    batch = random_ragged(seed)
    rows = batch.rows["theta"]
    total = math.fsum(x for row in rows for x in row)
    expected = {
        Aggregation.TOKEN_MEAN: total / sum(batch.lengths),
        Aggregation.SEQUENCE_MEAN: math.fsum(statistics.fmean(row) for row in rows if row) / len(rows),
        Aggregation.CONSTANT_LENGTH: total / (len(rows) * 17),
    }[method]
    assert aggregated(batch.packed("theta"), batch, method).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", list(Aggregation))
@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 9), max_size=3))
def test_a_step_cut_into_micro_batches_adds_up_to_the_same_loss(
    method: Aggregation, seed: int, cuts: list[int]
) -> None:
    batch = random_ragged(seed)
    losses, ids = batch.packed("theta"), batch.sequence_ids
    bounds = [0, *sorted(cuts), batch.n_sequences]
    parts = []
    for start, end in itertools.pairwise(bounds):
        own = (ids >= start) & (ids < end)
        parts.append(
            grpo.aggregate(
                losses[own],
                ids[own] - start,
                end - start,
                method,
                step_tokens=sum(batch.lengths),
                step_sequences=batch.n_sequences,
                constant_length=17,
            )
        )
    torch.testing.assert_close(sum(parts), aggregated(losses, batch, method), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", list(Aggregation))
def test_the_loss_of_no_tokens_is_0_and_can_be_differentiated(method: Aggregation) -> None:
    losses = torch.tensor([], requires_grad=True)
    result = grpo.aggregate(
        losses, torch.tensor([]).long(), 0, method, step_tokens=0, step_sequences=0, constant_length=1
    )
    result.backward()
    assert result.item() == 0


def test_the_mean_over_a_completion_without_tokens_is_0() -> None:
    means = grpo.sequence_means(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), 2)
    assert means.tolist() == [2.0, 0.0]
