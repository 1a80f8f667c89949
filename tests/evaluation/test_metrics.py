"""The metrics against formulas of their own: counting over all subsets, exact distributions, simulation."""

import itertools
import math
import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.metrics import (
    accuracy,
    lengths,
    majority_at_k,
    normalised,
)
from evaluation.store import Kind, Sample
from services.protocol.accuracy import GREEDY, pass_at_k
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason, RewardResult

TRUTH = "7"


def answered(answer, kind=Kind.SAMPLED, reward=None):
    """A judged sample from whose completion the verifier read an answer."""
    reward = float(answer == TRUTH) if reward is None else reward
    prompt = Prompt(id="p", prompt="", ground_truth=TRUTH)
    tokens = {"prompt_tokens": 1, "completion_tokens": 1, "seconds": 1.0}
    result = RewardResult(reward=reward, extracted=answer)
    return Sample.of(prompt, kind, 0, completion="", finish_reason=FinishReason.STOP, result=result, **tokens)


answers = st.lists(st.sampled_from(["7", "8", "9", None]).map(answered), min_size=1, max_size=7)


@st.composite
def answers_and_k(draw):
    drawn = draw(answers)
    return drawn, draw(st.integers(1, len(drawn)))


@given(st.integers(1, 300), st.data())
def test_pass_at_k_is_the_product_formula_of_the_paper_at_any_size(n, data):
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    none_right = math.prod((n - correct - i) / (n - i) for i in range(k)) if k <= n - correct else 0.0
    assert pass_at_k(n, correct, k) == pytest.approx(1 - none_right, abs=1e-12)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2), (0, 0, 1)])
def test_pass_at_k_refuses_impossible_arguments(n, correct, k):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, correct, k)


def chance_of_a_right_majority(subset):
    """Return the chance when one of the answers with the most votes is drawn."""
    votes = Counter(one.result.extracted for one in subset if one.result.extracted is not None)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())] if votes else []
    return winners.count(TRUTH) / len(winners) if winners else 0.0


@settings(max_examples=40)
@given(answers_and_k().filter(lambda drawn_and_k: len(drawn_and_k[0]) <= 5))
def test_majority_of_k_is_unbiased_over_the_order_of_samples(drawn_and_k):
    drawn, k = drawn_and_k
    over_orders = statistics.fmean(majority_at_k(order, k) for order in itertools.permutations(drawn))
    over_subsets = statistics.fmean(chance_of_a_right_majority(s) for s in itertools.combinations(drawn, k))
    assert over_orders == pytest.approx(over_subsets)


def test_spellings_of_one_answer_vote_together_and_different_answers_do_not():
    for one, other in [("7", "7.0"), ("1,234", "1234"), ("\\frac{1}{2}", "0.5"), ("x + 1", "X+1"), (" $7$ ", "7")]:
        assert normalised(one) == normalised(other)
    for one, other in [("7", "-7"), ("7", "70"), ("x", "y"), ("0.5", "0.25")]:
        assert normalised(one) != normalised(other)


RIGHT, WRONG = answered("7"), answered("8")
GREEDY_RIGHT, GREEDY_WRONG = answered("7", Kind.GREEDY), answered("8", Kind.GREEDY)


def test_each_metric_is_over_the_prompts_with_enough_answers():
    prompts = [
        [GREEDY_RIGHT, RIGHT, WRONG, WRONG, WRONG],
        [GREEDY_WRONG, WRONG, WRONG],
        [],
    ]
    metrics = accuracy(prompts, 4, [2, 4])
    assert {name: (m.value, m.prompts) for name, m in metrics.items()} == {
        GREEDY: (0.5, 2),
        "avg@4": (0.125, 2),
        "pass@2": (0.25, 2),
        "maj@2": (0.125, 2),
        "pass@4": (1.0, 1),
        "maj@4": (0.0, 1),
    }


def test_without_a_component_that_decides_there_is_no_metric():
    scored = RewardResult(reward=1.5, components={"judge": 1.5}, decided_by="")
    over_limit = RewardResult(reward=None, status="over_limit")
    prompts = [
        [sample.model_copy(update={"result": result})]
        for sample in (GREEDY_RIGHT, RIGHT)
        for result in (scored, over_limit)
    ]
    assert accuracy(prompts, 1, [1]) == {}


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=50))
def test_lengths(tokens):
    told = lengths(tokens)
    assert told["mean"] == pytest.approx(statistics.fmean(tokens))
    assert told["median"] == pytest.approx(statistics.median(tokens))
    assert told["max"] == max(tokens)
    assert sum(t <= told["p95"] + 1e-9 for t in tokens) >= 0.95 * len(tokens) - 1
    assert lengths([]) == {}
