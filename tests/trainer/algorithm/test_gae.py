"""A critic's advantages and value targets are the papers', computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.algorithm.gae import (
    explained_variance,
    generalized_advantages,
    value_loss,
    whitened,
)

# Two completions: three sampled tokens, two observations, two sampled tokens; then two sampled tokens.
REWARDS = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, -1.0], dtype=torch.float64)
VALUES = torch.tensor([0.1, 0.2, 0.3, 9.0, 9.0, 0.4, 0.5, 0.6, 0.7], dtype=torch.float64)
SEQUENCES = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1])
MASK = torch.tensor([True, True, True, False, False, True, True, True, True])
TURNS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 0, 0])


def advantages(**options: Any) -> Tensor:
    given = {"rewards": REWARDS, "values": VALUES, "sequence_ids": SEQUENCES, "loss_mask": MASK} | options
    return generalized_advantages(**given)


def test_the_recursion_skips_observations_and_ends_with_the_completion() -> None:
    gamma, lam = 0.9, 0.5
    last = 1.0 - 0.5
    before = 0.9 * 0.5 - 0.4 + gamma * lam * last
    end_of_turn = 0.9 * 0.4 - 0.3 + gamma * lam * before
    second = 0.5 + 0.9 * 0.3 - 0.2 + gamma * lam * end_of_turn
    first = 0.9 * 0.2 - 0.1 + gamma * lam * second
    other = -1.0 - 0.7
    expected = [first, second, end_of_turn, 0, 0, before, last, 0.9 * 0.7 - 0.6 + gamma * lam * other, other]
    assert advantages(gamma=gamma, lam=lam).tolist() == pytest.approx(expected)


def test_per_turn_discounts_between_turns_only() -> None:
    gamma, lam = 0.9, 0.5
    second_turn = [1.0 - 0.4, 1.0 - 0.5]
    then = gamma * 0.4 + gamma * lam * second_turn[0]
    expected = [0.5 + then - 0.1, 0.5 + then - 0.2, then - 0.3, 0, 0, *second_turn, -1.0 - 0.6, -1.0 - 0.7]
    assert advantages(gamma=gamma, lam=lam, turn_ids=TURNS).tolist() == pytest.approx(expected)


def test_two_turns_without_a_token_between_them_are_two() -> None:
    turns = TURNS.clone()
    turns[2] = 7
    then = 0.9 * 0.4 - 0.3 + 0.9 * 0.5 * (1.0 - 0.4)
    second = 0.5 + 0.9 * 0.3 - 0.2 + 0.9 * 0.5 * then
    found = advantages(gamma=0.9, lam=0.5, turn_ids=turns)[:3].tolist()
    assert found == pytest.approx([0.2 - 0.1 + second, second, then])


def test_a_reward_at_an_observation_is_the_token_before_its() -> None:
    moved = REWARDS.clone()
    moved[[1, 4]] = torch.tensor([0.0, 0.5], dtype=torch.float64)
    at_token = REWARDS.clone()
    at_token[[1, 2]] = torch.tensor([0.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(advantages(rewards=moved, gamma=0.9), advantages(rewards=at_token, gamma=0.9))


@pytest.mark.parametrize("turn_ids", [None, TURNS], ids=["tokens", "turns"])
def test_observations_alone_and_nothing_at_all_have_no_advantage(turn_ids: Tensor | None) -> None:
    nothing = torch.zeros_like(MASK)
    assert advantages(loss_mask=nothing, turn_ids=turn_ids).tolist() == [0.0] * 9
    empty = {"rewards": REWARDS[:0], "values": VALUES[:0], "sequence_ids": SEQUENCES[:0], "loss_mask": MASK[:0]}
    assert advantages(**empty, turn_ids=None if turn_ids is None else turn_ids[:0]).shape == (0,)
    first_is_observed = MASK.clone()
    first_is_observed[0] = False
    rewarded = REWARDS.clone()
    rewarded[0] = 7.0
    torch.testing.assert_close(
        advantages(rewards=rewarded, loss_mask=first_is_observed), advantages(loss_mask=first_is_observed)
    )


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_sampled_tokens() -> None:
    result = whitened(torch.arange(9, dtype=torch.float64), MASK)
    assert result[~MASK].tolist() == [0, 0]
    assert result[MASK].mean() == pytest.approx(0)
    assert result[MASK].std() == pytest.approx(1)
    two = whitened(torch.arange(9, dtype=torch.float64), torch.arange(9) < 2)
    assert two[:2].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


@pytest.mark.parametrize("n", [0, 1, 9])
def test_advantages_without_spread_are_whitened_to_zero(n: int) -> None:
    assert whitened(torch.full((9,), 0.3), torch.arange(9) < n).abs().max() < 1e-3


def test_the_value_loss_takes_the_larger_of_two_squares_and_stops_a_value_that_moved_enough() -> None:
    values = torch.tensor([0.5, 1.5, -0.5, 0.1], requires_grad=True)
    losses, is_clipped = value_loss(values, torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, 1.0]), clip=0.2)
    assert losses.tolist() == pytest.approx([0.8**2 / 2, 0.8**2 / 2, 1.5**2 / 2, 0.9**2 / 2])
    assert is_clipped.tolist() == [True, True, False, False]
    losses.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0, 0, -1.5, -0.9])
    unbounded, is_clipped = value_loss(values, torch.zeros(4), torch.ones(4))
    assert unbounded.tolist() == pytest.approx([0.125, 0.125, 1.125, 0.405])
    assert not is_clipped.any()


def test_the_explained_variance_tells_a_critic_from_a_constant() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((4,), 5.0), returns) == 0
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(returns / 2, returns) == pytest.approx(0.75)
    assert explained_variance(returns, torch.ones(4)) == 0
