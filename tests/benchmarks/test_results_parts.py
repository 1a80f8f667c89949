"""The parts of the results page about methods, staleness, replay and rounding: what their runs do and tables say."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.results import in_process, learned, methods, off_policy, rounding
from benchmarks.results.baselines import best_of_group, right_answers
from benchmarks.results.methods import BASE, CHOOSING, Methods, Rates, reward_of_tokens
from benchmarks.results.runs import Part, Result, Run
from benchmarks.results.tasks import TINY, seeded
from trainer.algorithm.advantages import Outcomes

SHORT = seeded(TINY, 0) | {"MAX_STEPS": "3", "EVAL_PROMPTS": "4", "EVAL_SAMPLES": "2", "LEARNING_RATE": "1e-2"}


def result(variant: str, rewards: list[float], *, task: str = "tiny", seed: int = 0, tokens: int = 10) -> Result:
    return Result(task, variant, seed, {}, rewards, [tokens] * len(rewards))


def test_with_a_lag_the_engine_samples_by_older_weights_and_the_last_ones_are_evaluated() -> None:
    def rewards(steps: str, lag: int, rate: str) -> Result:
        settings = SHORT | {"MAX_STEPS": steps, "LEARNING_RATE": rate}
        return in_process.train(Run("tiny", "run", 0, settings, in_process.train), lag=lag)

    small, large = (rewards("4", 2, rate) for rate in ("1e-8", "1e-2"))
    assert small.rewards[:3] == large.rewards[:3], "the first three steps sample by the untrained policy"
    assert small.rewards[3] != large.rewards[3], "the fourth samples by the policy after one step"
    own = rewards("2", 0, "1e-2")
    assert own.rewards[1] != large.rewards[1]
    assert rewards("1", 2, "1e-2").accuracy == rewards("1", 0, "1e-2").accuracy, "the last policy is evaluated"


def test_the_untrained_policy_is_evaluated_as_it_is_and_by_its_best_answers() -> None:
    settings = SHORT | {"EVAL_SAMPLES": "8", "EVAL_PROMPTS": "16"}
    mean, best = (in_process.evaluate(Run("tiny", "none", 0, settings, in_process.evaluate), best=b) for b in (0, 1))
    assert mean.tokens == best.tokens
    assert mean.area < best.area
    assert (mean.samples, mean.prompts) == (8, 16)
    assert mean.accuracy is not None
    assert best.accuracy is not None
    assert mean.accuracy <= best.accuracy <= 8 * mean.accuracy + 1e-9, "pass@8 is at most the sum of eight chances"


def test_rejection_sampling_learns_from_right_answers_or_the_best_of_a_group() -> None:
    rewards = torch.tensor([1.0, 0.5, 1.0, 0.25, 0.25, 0.75, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3])
    outcomes = Outcomes(rewards, ids, torch.ones(10, dtype=torch.int64))
    assert right_answers(outcomes).tolist() == [1, 0, 1, 0, 0, 0, 0, 0, 1, 1]
    assert best_of_group(outcomes).tolist() == [1, 0, 1, 0, 0, 1, 0, 0, 0, 0]


def test_a_method_is_compared_at_the_rate_that_its_own_seeds_choose() -> None:
    table = Methods("tiny", TINY, {BASE: {}, "other": {"LOSS": "gspo"}}, Rates(("1", "2"), {BASE: "2"}))
    choosing = [run for seed in CHOOSING for run in table.choosing(seed)]
    assert {run.variant for run in choosing} == {"GRPO at 1", "GRPO at 2", "other at 1", "other at 2"}
    compared = {run.variant: run.settings["LEARNING_RATE"] for run in table.compared(0)}
    assert compared == {BASE: "2", "other": TINY["LEARNING_RATE"]}
    means = {"GRPO at 1": 0.25, "GRPO at 2": 0.5, "other at 1": 0.75, "other at 2": 0.5}
    results = [result(run.variant, [means[run.variant]], task=run.task, seed=run.seed) for run in choosing]
    assert table.best(results) == {BASE: "2", "other": "1"}
    assert table.best(results[1:]) == {"other": "1"}, "GRPO lacks a run of the choice"
    assert "| GRPO | 0.250 | **0.500** | 2 |" in table.choice_table(results)


@pytest.mark.parametrize(
    ("compared", "part"),
    [(methods.TINY_COMPARISON, methods.TINY_PART), (methods.DEMO_COMPARISON, methods.DEMO_PART)],
    ids=["tiny", "demo"],
)
def test_the_kept_runs_choose_the_rates_at_which_the_page_compares(compared: methods.Comparison, part: Part) -> None:
    for table in (compared.once, compared.often):
        best = table.best(part.results())
        assert best == {method: table.rate(method) for method in best}


def test_rewards_by_tokens_are_weighted_by_their_tokens_up_to_the_budget() -> None:
    run = replace(result("GRPO", [0.0, 1.0, 0.5]), tokens=[10, 20, 30])
    assert reward_of_tokens(run, 60) == pytest.approx((20 + 15) / 60)
    assert reward_of_tokens(run, 20) == pytest.approx(10 / 20)


def test_the_break_even_counts_the_updates_of_the_policy_that_sampled() -> None:
    rising = result("run", [0.0, 0.3, 0.6, 0.6, 0.6, 0.7])
    assert off_policy.versions_until(rising, 0) == 4
    assert off_policy.versions_until(rising, 2) == 2
    assert off_policy.versions_until(result("run", [0.0] * 6), 0) == math.inf
    task = "learning rate 5e-4"
    slower = [0.0] * 2 + rising.rewards
    runs = [replace(rising, task=task, variant=off_policy.NO_LAG), result("lag 1", slower, task=task)]
    assert "| lag 1 | 5.0 | 1.25 | 25% |" in off_policy.break_even(runs)


def test_replay_generates_as_many_tokens_or_takes_fewer_steps() -> None:
    for name, task in off_policy.REPLAY_TASKS.items():
        variants = task.variants()
        steps = {settings.get("MAX_STEPS", task.settings["MAX_STEPS"]) for settings in variants.values()}
        assert steps == {task.settings["MAX_STEPS"], *task.steps.values()}, name


def test_random_moves_are_optimal_as_often_as_the_page_says() -> None:
    assert learned.random_play() == pytest.approx(0.45, abs=0.05)


def test_the_share_of_a_small_update_is_lost_by_rounding_to_the_nearest_alone() -> None:
    settings = SHORT | {"MAX_STEPS": "1", "EVAL_PROMPTS": "0", "LEARNING_RATE": "1e-6"}
    measured = rounding.train_measured(Run("share", "1e-6", 0, settings, partial(rounding.train_measured)))
    assert measured.figures[f"{rounding.NEAREST}, 1"] < 0.5
    for form in (rounding.DITHER, rounding.FRESH):
        assert measured.figures[f"{form}, 1"] == pytest.approx(1, abs=0.2)
