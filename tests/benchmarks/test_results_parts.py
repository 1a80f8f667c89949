"""The parts of the results page about methods, staleness, replay and rounding: what their runs do and tables say."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.results import distillation, episodes, in_process, off_policy
from benchmarks.results.baselines import best_of_group, right_answers
from benchmarks.results.experiments import PARTS, REPLAY, SHORTER
from benchmarks.results.methods import RATES, TRIED, best, choice, choosing, reward_of_tokens
from benchmarks.results.runs import Result, Run
from benchmarks.results.tasks import TINY
from trainer.algorithm.advantages import Outcomes

pytestmark = pytest.mark.leaving

SHORT = (
    TINY
    | {"SEED": "0", "DATA_SEED": "0"}
    | {"MAX_STEPS": "3", "EVAL_PROMPTS": "4", "EVAL_SAMPLES": "2", "LEARNING_RATE": "1e-2"}
)


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


def test_the_runs_of_the_choice_say_which_rate_is_best() -> None:
    runs = choosing()
    assert {run.settings["LEARNING_RATE"] for run in runs} == set(TRIED)
    results = [result(run.variant, [0.5 if run.variant.endswith("2e-3") else 0.25], task=run.task) for run in runs]
    assert best(results) == dict.fromkeys(RATES, "2e-3")
    assert "GRPO" not in best(results[1:]), "GRPO lacks a run of the choice"
    assert "| GRPO | 0.250 | **0.500** | 0.250 | 4e-3 |" in choice(results)


def test_the_kept_runs_choose_the_rates_at_which_the_page_compares() -> None:
    [part] = [part for part in PARTS if part.name == "methods"]
    assert best(part.results()) == RATES


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
    assert "| lag 1 | 5.0 | 1.25 | 25% |" in off_policy.break_even(runs, task)


def test_replay_generates_as_many_tokens_or_takes_fewer_steps() -> None:
    assert not any("MAX_STEPS" in settings for settings in REPLAY.values())
    assert all(int(settings["MAX_STEPS"]) < int(TINY["MAX_STEPS"]) for settings in SHORTER.values())


def test_random_moves_are_optimal_as_often_as_the_page_says() -> None:
    assert episodes.random_play() == pytest.approx(0.45, abs=0.05)


def test_controls_of_distillation_keep_the_sizes_of_distances_or_only_their_places() -> None:
    policy, teacher = np.array([-0.1, -4.0, -2.0]), np.array([-0.5, -3.0, -9.0])
    random = np.random.default_rng(0)
    assert distillation.constant_penalty(random, policy, teacher).tolist() == [-0.1, -9.0, -2.0]
    distances = policy - distillation.shuffled(random, policy, teacher)
    assert sorted(distances) == pytest.approx(sorted(policy - teacher))


def test_students_are_measured_by_their_teacher_and_learn_from_it_only_if_told() -> None:
    teacher = SHORT | {"MAX_STEPS": "2", "EVAL_PROMPTS": "4"}
    ways = distillation.variants(teacher) | distillation.baselined(teacher)
    runs = {
        name: train(Run("tiny", name, 0, SHORT | {"MAX_STEPS": "4"} | own, train))
        for name, (own, train) in ways.items()
    }
    grpo, one = runs[distillation.BASE], runs[distillation.ONE]
    assert grpo.figures.keys() == one.figures.keys() >= {"accuracy_4", "kl_4", "tokens_4", "teacher_accuracy"}
    assert grpo.figures["kl_4"] > 0
    assert grpo.figures["tokens_4"] == sum(grpo.tokens) > 4 * sum(one.tokens)
    assert len({tuple(run.rewards) for run in runs.values()}) == len(runs), "each way learns something else"
    table = distillation.by_tokens(list(runs.values()), "tiny")
    assert all(f"| {name} |" in table for name in ways)
