"""Right answers, pass@k, standard errors and intervals."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from services.protocol.accuracy import estimate, is_correct, is_judged, standard_error, verdicts
from services.protocol.rewards import RewardResult, RewardStatus


@pytest.mark.parametrize(
    ("reward", "status", "verdict"),
    [
        (1.0, "scored", True),
        (1.2, "scored", True),
        (0.99, "scored", False),
        (None, "over_limit", False),
        (0.0, "over_limit", False),
        (1.0, "over_limit", False),
        (None, "timeout", None),
        (None, "error", None),
        (None, "overloaded", None),
    ],
)
def test_an_answer_is_not_judged_only_where_the_service_failed(reward, status, verdict):
    assert is_correct(RewardResult.model_validate({"reward": reward, "status": status})) is verdict


@pytest.mark.parametrize(
    ("decided_by", "parts", "right"),
    [
        ("math", {"math": 0.0, "format": 1.0}, False),
        ("math", {"math": 1.0, "f:short": -1.0}, True),
        ("f:share", {"f:share": 0.99, "f:percent": 40.0}, False),
        ("f:share", {"f:share": None, "f:percent": 40.0}, None),
        ("", {"judge": 3.0}, None),
        (None, {"f:share": 0.5, "f:percent": 40.0}, True),
    ],
)
def test_one_component_says_whether_an_answer_is_right(decided_by, parts, right):
    results = [
        RewardResult(reward=sum(value or 0 for value in parts.values()), components=parts, decided_by=decided_by),
        RewardResult(reward=None, status="over_limit", components=parts, decided_by=decided_by),
        RewardResult(reward=None, status="error", components=parts, decided_by=decided_by),
    ]
    assert [is_correct(result) for result in results] == [right, False, None]
    assert [is_judged(result) for result in results] == [True, True, False]
    assert verdicts(results) == ([] if decided_by == "" else [right, False] if right is not None else [False])
    assert all(RewardResult.model_validate_json(result.model_dump_json()) == result for result in results)


@pytest.mark.parametrize("status", [status for status in RewardStatus if status is not RewardStatus.SCORED])
def test_only_an_answer_that_was_judged_may_have_a_reward(status):
    assert RewardResult(reward=None, status=status).reward is None
    if status is RewardStatus.OVER_LIMIT:
        assert RewardResult(reward=-1.0, status=status).reward == -1.0
    else:
        with pytest.raises(ValidationError, match="does not fit status"):
            RewardResult(reward=-1.0, status=status)
    with pytest.raises(ValidationError, match="does not fit status"):
        RewardResult(reward=None)


@pytest.mark.parametrize(("right", "n"), [(0, 20), (1, 20), (19, 20), (64, 128), (1, 1)])
def test_the_standard_error_of_an_accuracy_is_binomial(right, n):
    p = right / n
    assert standard_error([1.0] * right + [0.0] * (n - right)) == pytest.approx(math.sqrt(p * (1 - p) / n))


@pytest.mark.parametrize(("right", "n"), [(0, 20), (1, 20), (20, 20), (4, 10), (64, 128), (0, 1)])
def test_the_ends_of_an_accuracys_interval_are_the_truths_just_compatible_with_it(right, n):
    found = estimate([1.0] * right + [0.0] * (n - right))
    low, high = found.low, found.high
    assert 0 <= low <= right / n <= high <= 1
    assert high - low > 1 / (2 * n), "also at 0 and at 1"
    for truth in {low, high} - {0.0, 1.0}:
        # Wilson's equation: the share is 1.96 of the truth's own standard errors away from it.
        assert abs(right / n - truth) == pytest.approx(1.96 * math.sqrt(truth * (1 - truth) / n), rel=1e-3, abs=1e-9)
