"""Tests of the arithmetic of benchmarks, where an error would give a wrong number and no failure."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks import asynchronous, recovery, reward
from benchmarks.asynchronous import Mode
from benchmarks.common import output_head
from benchmarks.common.harness import spread
from benchmarks.common.job import DEMO
from benchmarks.common.slow_engine import slowed
from benchmarks.common.slow_rollouts import job_group_with_slow_rollouts
from benchmarks.common.training import Work
from benchmarks.common.trl_side import Steps
from benchmarks.reward import Side
from local_runner import spec


def test_a_spread_is_the_median_with_the_least_and_the_most() -> None:
    assert spread([3.0, 1.0, 2.5]) == "2.50 (1.00 to 3.00)"
    assert spread([]) == ""


@pytest.mark.parametrize(
    ("rewards", "count"),
    [([1.0, 1.0], None), ([0.0, 1.0, 1.0, 1.0, 1.0], 4), ([0.9, 0.9, 0.9], 3), ([0.8] * 5, None)],
)
def test_a_reward_is_reached_when_three_steps_have_it_in_the_mean(rewards: list[float], count: int | None) -> None:
    assert reward.reached(rewards, 0.9) == count


def test_the_seconds_to_a_reward_end_with_the_step_that_reached_it() -> None:
    rewards = [0.0, 1.0, 1.0, 1.0, 1.0]
    lucky, never = Steps([9.0, 1.0, 1.0, 2.0, 50.0], rewards), Steps([9.0, 1.0], [0.0, 0.0])
    side = Side("ours", 0.9, [lucky, never])
    assert side.counts == [4, None]
    assert side.steps == [4, 2]
    assert side.seconds == [13.0, 10.0]
    assert side.last_reward == pytest.approx(3 / 5)


def test_who_never_reached_the_reward_has_no_ratio_and_bounds_that_of_the_other() -> None:
    fast, never = Steps([1.0] * 3, [1.0] * 3), Steps([5.0] * 3, [0.0] * 3)
    for sides, shown in [
        ([Side("ours", 0.9, [fast]), Side("TRL", 0.9, [Steps([5.0] * 3, [1.0] * 3)])], ["0.20", "1.00"]),
        ([Side("ours", 0.9, [fast]), Side("TRL", 0.9, [never])], ["less than 0.20", ""]),
        ([Side("ours", 0.9, [never]), Side("TRL", 0.9, [fast])], ["", "1.00"]),
    ]:
        table = reward.show(sides)
        assert list(table.columns[4].cells) == shown


def test_the_demos_settings_are_what_trl_gets() -> None:
    work = reward.work_of_the_demo()
    assert (work.prompts, work.group_size, work.completion_tokens, work.learning_rate) == (8, 8, 8, 2e-5)
    # trl_grpo.py, which imports nothing of this project, has the same two of its own.
    assert (DEMO["PROMPT_STYLE"], DEMO["REWARD_FN"]) == ("plain", "exact_match")


def test_only_rounded_products_of_the_output_head_have_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_head, "SHAPES", {"tiny": (5000, 32)})
    forward, backward = output_head.measure(1)
    largest = {way.name: max(way.errors) for way in forward}
    assert all(largest[name] < 1e-4 for name in list(output_head.FORWARD)[:3])
    assert largest["bfloat16 logits and their error"] < 1e-3 < largest["bfloat16 logits, shifted"]
    assert largest["bfloat16 logits in four parts"] > 1e-3 < largest["bfloat16 logits"]
    assert max(backward[0].errors) < 1e-5 < min(backward[-1].errors) < 1e-2


def test_seconds_lost_are_those_beyond_the_usual() -> None:
    steps = [{"time": 100.0 + 2 * number} for number in range(5)]
    assert recovery.step_seconds(steps) == 2.0
    # Killed at 108; three steps by 124, which would have been done by 114.
    assert recovery.lost(108.0, [{"time": 120.0}, {"time": 122.0}, {"time": 124.0}], 2.0) == 10.0
    assert recovery.lost(108.0, [{"time": 109.0}], 2.0) == 0.0


def test_a_round_of_a_job_is_counted_from_the_end_of_its_first_step() -> None:
    mode = Mode(slowdown=1.0)
    step = {"groups": 4, "seconds_generate": 1.0, "seconds_score": 0.5, "seconds_train": 2.0, "staleness_mean": 0.0}
    mode.add([step | {"time": 10.0, "groups": 100}, step | {"time": 20.0}, step | {"time": 34.0}])
    assert mode.group_seconds == [3.0]
    assert mode.wait_seconds == [1.5]


def test_only_the_last_slowdown_meets_every_bound_of_staleness() -> None:
    modes = asynchronous.modes_of([1.0, 4.0], [1, 2, 4])
    assert [(mode.slowdown, mode.max_staleness) for mode in modes] == [
        (1.0, None),
        (1.0, 2),
        (4.0, None),
        (4.0, 1),
        (4.0, 2),
        (4.0, 4),
    ]


def test_slowed_work_takes_as_many_times_as_long() -> None:
    slow = slowed(lambda: time.sleep(0.02), 4)
    began = time.perf_counter()
    slow()
    # Never less; how much more is the machine's.
    assert time.perf_counter() - began >= 0.08


@pytest.mark.parametrize("job_group", ["jobgroup.yaml", "jobgroup-async.yaml"])
def test_a_job_group_with_slow_rollouts_differs_in_these_alone(job_group: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    usual, slow = spec.load(root / job_group), spec.load(job_group_with_slow_rollouts(job_group, 4, tmp_path))
    changed = [task.name for task, other in zip(usual.tasks, slow.tasks, strict=True) if task != other]
    assert changed == ["rollout-server"]


def test_prompts_that_are_not_shared_are_the_same_work_in_more_groups() -> None:
    shared, apart = Work("", prompts=3, group_size=4), Work("", prompts=3, group_size=4, shares_prompts=False)

    def sequences(work: Work) -> list[tuple[list[int], list[int], float]]:
        return [
            (group.prompt_ids, sequence.completion_ids, sequence.advantage)
            for group in work.groups(100, seed=0)
            for sequence in group.sequences
        ]

    assert sequences(shared) == sequences(apart)
    assert len(apart.groups(100, seed=0)) == 12
