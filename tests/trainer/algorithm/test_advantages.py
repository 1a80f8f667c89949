"""Every advantage against its formula, written out here completion by completion in float64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithm.advantages import (
    ADVANTAGE_FUNCTIONS,
    Outcomes,
    UnfitRewardsError,
    gdpo,
    has_reward_variance,
    overlong_penalty,
    rae,
)
from trainer.algorithm.methods import ADVANTAGES

# 1/3 and 0.1 have no exact mean, which is where equal rewards become an advantage by rounding.
rewards_of_a_group = st.lists(
    st.one_of(st.sampled_from([0.0, 1.0, 0.1, 1 / 3]), st.floats(-1e3, 1e3, allow_subnormal=False)),
    min_size=1,
    max_size=9,
)


def advantages_of(
    method: str, groups: list[list[float]], lengths: list[int] | None = None, eps: float = 1e-4
) -> list[list[float]]:
    """Return the advantages of each group's completions."""
    rewards = [r for group in groups for r in group]
    outcomes = Outcomes(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor([i for i, group in enumerate(groups) for _ in group], dtype=torch.int64),
        lengths=torch.tensor(lengths or [1] * len(rewards), dtype=torch.int64),
        eps=eps,
    )
    found = iter(ADVANTAGE_FUNCTIONS[method](outcomes).tolist())
    return [[next(found) for _ in group] for group in groups]


def centred(rewards: list[float]) -> list[float]:
    mean = statistics.fmean(rewards)
    return [r - mean if len(set(rewards)) > 1 else 0.0 for r in rewards]


def grpo(rewards: list[float], eps: float = 1e-4) -> list[float]:
    return [x / (statistics.stdev(rewards) + eps) if len(set(rewards)) > 1 else 0.0 for x in centred(rewards)]


def rloo(rewards: list[float]) -> list[float]:
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    return [r - (math.fsum(rewards) - r) / (len(rewards) - 1) for r in rewards]


BY_GROUP: dict[str, Callable[[list[float]], list[float]]] = {"grpo": grpo, "dr_grpo": centred, "rloo": rloo}


@pytest.mark.parametrize("method", BY_GROUP)
@settings(max_examples=60)
@given(groups=st.lists(rewards_of_a_group, min_size=1, max_size=5), shuffle=st.randoms(use_true_random=False))
def test_group_advantages_are_the_formula_whatever_the_order_and_numbering_of_groups(
    method: str, groups: list[list[float]], shuffle: Any
) -> None:
    numbers = shuffle.sample(range(-50, 50), len(groups))
    rows = [
        (reward, number, expected)
        for number, group in zip(numbers, groups, strict=True)
        for reward, expected in zip(group, BY_GROUP[method](group), strict=True)
    ]
    shuffle.shuffle(rows)
    rewards, ids, expected = zip(*rows, strict=True)
    outcomes = Outcomes(torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids), torch.ones(len(ids)).long())
    result = ADVANTAGE_FUNCTIONS[method](outcomes)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("method", [*BY_GROUP, "batch_std", "pass_at_k", "maxrl"])
@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 7, [1 / 3] * 3], ids=str)
def test_a_group_without_two_different_rewards_has_exactly_no_advantage(method: str, rewards: list[float]) -> None:
    others = [[0.0, 1.0, 5.0]]
    assert advantages_of(method, [rewards, *others])[0] == [0.0] * len(rewards)
    assert not has_reward_variance(torch.tensor(rewards), torch.zeros(len(rewards)).long()).any()


def test_small_differences_of_large_rewards_are_kept() -> None:
    assert advantages_of("grpo", [[1e6, 1e6 + 1, 1e6 + 2]], eps=0.0)[0] == pytest.approx([-1.0, 0.0, 1.0])


def test_the_deviation_of_the_batch_scales_groups_alike() -> None:
    groups = [[0.0, 1.0], [0.5, 0.52]]
    deviation = statistics.stdev([0.0, 1.0, 0.5, 0.52])
    expected = [[x / (deviation + 1e-4) for x in centred(group)] for group in groups]
    assert advantages_of("batch_std", groups) == [pytest.approx(group) for group in expected]
    assert advantages_of("grpo", groups)[1][1] > 10 * expected[1][1], "its own deviation blows a small group up"


@pytest.mark.parametrize("method", ["reinforce", "reinforce_baseline"])
def test_reinforce_is_white_over_the_tokens_of_the_batch(method: str) -> None:
    groups, lengths = [[0.0, 1.0, 1.0], [2.0, 5.0]], [3, 1, 4, 2, 6]
    values = [x for group in groups for x in (group if method == "reinforce" else centred(group))]
    tokens = [x for x, length in zip(values, lengths, strict=True) for _ in range(length)]
    mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens)
    found = [x for group in advantages_of(method, groups, lengths) for x in group]
    assert found == pytest.approx([(x - mean) / deviation for x in values], rel=1e-6)


def test_pass_at_k_gives_the_best_completion_its_lead() -> None:
    groups = [[0.0, 3.0, 1.0], [1.0, 1.0], [2.0], [0.5, 2.0]]
    assert advantages_of("pass_at_k", groups) == [[0.0, 2.0, 0.0], [0.0, 0.0], [0.0], [0.0, 1.5]]


def test_maxrl_divides_what_a_reward_is_above_the_mean_by_the_mean() -> None:
    groups = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0], [1.0, 0.0, 0.5]]
    expected = [[3.0, -1.0, -1.0, -1.0], [0.0, 0.0], [0.0, 0.0], [0.0], [1.0, -1.0, 0.0]]
    assert advantages_of("maxrl", groups) == expected


def test_maxrl_refuses_a_negative_reward() -> None:
    with pytest.raises(UnfitRewardsError, match=r"a reward is -0\.5"):
        advantages_of("maxrl", [[1.0, 0.0], [1.0, -0.5]])


NAN = math.nan
R1 = [[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]]
R2 = [[0.0, 1.0, 1.0, 0.0], [0.5, 0.5, 0.5, 0.0]]


def component_advantages(
    components: dict[str, list[list[float]]],
    weights: dict[str, float] | None = None,
    lengths: list[int] | None = None,
    eps: float = 1e-4,
) -> list[float]:
    """Return GDPO's advantages of all completions; the rewards are 7 and mean nothing."""
    groups = next(iter(components.values()))
    count = sum(map(len, groups))
    outcomes = Outcomes(
        torch.full((count,), 7.0, dtype=torch.float64),
        torch.tensor([i for i, group in enumerate(groups) for _ in group]),
        torch.tensor(lengths or [1] * count),
        eps,
        {name: torch.tensor([x for group in values for x in group]).double() for name, values in components.items()},
    )
    return gdpo(outcomes, weights).tolist()


def white(values: list[float], lengths: list[int]) -> list[float]:
    tokens = [x for x, length in zip(values, lengths, strict=True) for _ in range(length)]
    return [(x - statistics.fmean(tokens)) / statistics.stdev(tokens) for x in values]


def test_gdpo_normalises_each_component_in_its_group_before_it_adds_them() -> None:
    """The sum of both orders the last two of the second group otherwise, whose last completion is worth 1 of 1.5."""
    lengths = [1, 2, 3, 2, 1, 1, 2, 3]
    for eps in (0.5, 1e-4):
        parts = [[x for group in component for x in grpo(group, eps)] for component in (R1, R2)]
        sums = [one + 0.5 * two for one, two in zip(*parts, strict=True)]
        found = component_advantages({"a": R1, "b": R2}, {"a": 1.0, "b": 0.5}, lengths, eps)
        assert found == pytest.approx(white(sums, lengths), rel=1e-6)
    assert found[-1] < 0 < sum((grpo([1.25, 1.25, 0.25, 1.0])[-1],))
    assert component_advantages({"a": R1, "b": R2}) != pytest.approx(found), "unnamed weights are 1"
    assert component_advantages({"a": R1, "b": R2}) == component_advantages({"a": R1, "b": R2}, {"b": 1, "a": 1})


def test_a_component_counts_among_those_to_which_it_applies_and_a_constant_one_not_at_all() -> None:
    a, sparse, constant = [[1.0, 0.0, 0.0], [0.1] * 3], [[NAN, 2.0, 4.0], [NAN, NAN, 3.0]], [[0.1] * 3, [0.35] * 3]
    sums = [*grpo([1.0, 0.0, 0.0]), 0.0, 0.0, 0.0]
    for place, value in zip((1, 2), grpo([2.0, 4.0]), strict=True):
        sums[place] += value
    found = component_advantages({"a": a, "sparse": sparse, "constant": constant}, lengths=[1, 2, 1, 1, 1, 1])
    assert found == pytest.approx(white(sums, [1, 2, 1, 1, 1, 1]), rel=1e-6)
    assert component_advantages({"constant": constant}) == [0.0] * 6
    assert component_advantages({"a": [[0.7], [0.2]]}) == [0.0, 0.0], "groups of one"


def test_gdpo_of_nothing_but_answers_over_a_limit_is_0() -> None:
    empty = Outcomes(torch.ones(2).double(), torch.zeros(2).long(), torch.ones(2).long())
    assert gdpo(empty, {"a": 1.0}).tolist() == [0.0, 0.0]


def test_rae_takes_from_each_reward_the_running_mean_of_its_seat() -> None:
    rewards, seats = torch.tensor([1.0, -1.0, 1.0, 0.5, 2.0]).double(), (0, 1, 0, 0, 1)
    outcomes = Outcomes(
        rewards, torch.arange(5), torch.ones(5).long(), seats=seats, are_replayed=(False,) * 4 + (True,)
    )
    advantages, after = rae(outcomes, {1: -0.5})
    first = 0.05
    second = 0.95 * first + 0.05
    one = 0.95 * -0.5 - 0.05
    assert advantages.tolist() == pytest.approx([1.0, -0.5, 1 - first, 0.5 - second, 2 - one])
    assert after == pytest.approx({0: 0.95 * second + 0.025, 1: one}), "a replayed completion moves nothing"
    again = {0: 0.25}
    plain, moved = rae(Outcomes(rewards[:1], torch.arange(1), torch.ones(1).long()), again)
    assert (plain.item(), moved, again) == (1.0, {0: 0.25, -1: pytest.approx(0.05)}, {0: 0.25})


def test_every_advantage_that_can_be_chosen_has_its_function() -> None:
    assert {*ADVANTAGE_FUNCTIONS, "rae", "gae"} == set(ADVANTAGES)


@settings(max_examples=100)
@given(length=st.integers(0, 300), limit=st.integers(2, 200), share=st.floats(0.01, 1))
def test_the_overlong_penalty_falls_from_0_to_minus_1_over_the_buffer(length: int, limit: int, share: float) -> None:
    buffer = max(int(limit * share), 1)
    if length <= limit - buffer:
        expected = 0.0
    elif length <= limit:
        expected = (limit - buffer - length) / buffer
    else:
        expected = -1.0
    result = overlong_penalty(torch.tensor([length]), limit, buffer)
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(expected, abs=1e-6)
