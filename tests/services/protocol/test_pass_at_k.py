"""Right answers, pass@k and standard errors."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from services.protocol.groups import RewardResult, RewardStatus
from services.protocol.pass_at_k import is_correct, standard_error


@pytest.mark.parametrize(
    ("reward", "status", "verdict"),
    [
        (1.0, "scored", True),
        (1.2, "scored", True),
        (0.99, "scored", False),
        (None, "timeout", False),
        (None, "memory", False),
        (None, "error", None),
        (None, "overloaded", None),
    ],
)
def test_an_answer_is_not_judged_only_where_the_service_failed(reward, status, verdict):
    assert is_correct(RewardResult(reward=reward, status=RewardStatus(status))) is verdict


@pytest.mark.parametrize(("right", "n"), [(0, 20), (1, 20), (19, 20), (64, 128), (1, 1)])
def test_the_standard_error_of_an_accuracy_is_binomial(right, n):
    p = right / n
    assert standard_error([1.0] * right + [0.0] * (n - right)) == pytest.approx(math.sqrt(p * (1 - p) / n))


def test_the_standard_error_of_avg_at_k_is_its_spread_over_other_prompts():
    draw = random.Random(0)

    def scores():
        difficulties = [draw.betavariate(0.5, 0.5) for _ in range(40)]
        return [statistics.fmean(draw.random() < p for _ in range(8)) for p in difficulties]

    trials = [scores() for _ in range(400)]
    moves = statistics.stdev(map(statistics.fmean, trials))
    assert statistics.fmean(map(standard_error, trials)) == pytest.approx(moves, rel=0.1)
    # As if all 320 samples were independent: far too small.
    mean = statistics.fmean(map(statistics.fmean, trials))
    assert math.sqrt(mean * (1 - mean) / 320) < moves / 2
