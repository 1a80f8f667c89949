"""Tests of the arithmetic of benchmarks, where an error would give a wrong number and no failure."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

import pytest
from rich.table import Table

from benchmarks import against_trl, asynchronous
from benchmarks.harness import ROOT, Side, spread
from benchmarks.job import write_job_group
from benchmarks.slow_rollouts import slowed
from benchmarks.training import Work
from local_runner import spec


def test_a_spread_is_the_median_with_the_least_and_the_most() -> None:
    assert spread([3.0, 1.0, 2.5]) == "2.50 (1.00 to 3.00)"
    assert spread([]) == ""


@pytest.mark.parametrize(
    ("rewards", "count"),
    [([1.0, 1.0], None), ([0.0, 1.0, 1.0, 1.0, 1.0], 4), ([0.9, 0.9, 0.9], 3), ([0.8] * 5, None)],
)
def test_a_reward_is_reached_when_three_steps_have_it_in_the_mean(rewards: list[float], count: int | None) -> None:
    assert against_trl.reached(rewards, 0.9) == count


def never(_round: int) -> dict[str, float]:
    raise NotImplementedError


def first_row(table: Table) -> list[object]:
    return [next(iter(column.cells)) for column in table.columns]


def test_the_seconds_to_a_reward_end_with_the_step_that_reached_it() -> None:
    lucky = {"seconds": [9.0, 1.0, 1.0, 2.0, 50.0], "rewards": [0.0, 1.0, 1.0, 1.0, 1.0]}
    unlucky = {"seconds": [9.0, 1.0], "rewards": [0.0, 0.0]}
    [table] = against_trl.REWARD.tables(Namespace(reward=0.9), [Side("ours", never, [lucky, unlucky])])
    assert first_row(table) == ["ours", "1 of 2", "3 (2 to 4)", "12 (10 to 13)", "", "0.60"]


def test_who_never_reached_the_reward_has_no_ratio_and_bounds_that_of_the_other() -> None:
    fast, slow, failed = (
        {"seconds": [seconds] * 3, "rewards": [reward] * 3} for seconds, reward in ((1.0, 1.0), (5.0, 1.0), (5.0, 0.0))
    )
    for ours, theirs, ratios in [
        (fast, slow, ["0.20", "1.00"]),
        (fast, failed, ["less than 0.20", ""]),
        (failed, fast, ["", "1.00"]),
    ]:
        sides = [Side("ours", never, [ours]), Side("TRL", never, [theirs])]
        [table] = against_trl.REWARD.tables(Namespace(reward=0.9), sides)
        assert list(table.columns[4].cells) == ratios


def test_a_round_of_a_job_is_counted_from_the_end_of_its_first_step() -> None:
    step = {"groups": 4, "seconds_generate": 1.0, "seconds_score": 0.5, "seconds_train": 2.0, "staleness_mean": 0.0}
    found = asynchronous.round_of([step | {"time": 10.0, "groups": 100}, step | {"time": 20.0}, step | {"time": 34.0}])
    assert (found["seconds a group"], found["waits"]) == (3.0, 1.5)


def test_only_the_last_slowdown_meets_every_bound_of_staleness() -> None:
    assert asynchronous.cases_of([1.0, 4.0], [1, 2, 4]) == [
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


@pytest.mark.parametrize("job_group", ["jobgroup.yaml", "jobgroups/async.yaml"])
def test_a_job_group_with_another_command_differs_in_it_alone(job_group: str, tmp_path: Path) -> None:
    usual = spec.load(ROOT / job_group)
    changed = spec.load(write_job_group(tmp_path, job_group, {"rollout-server": "true"}))
    different = [(task, other) for task, other in zip(usual.tasks, changed.tasks, strict=True) if task != other]
    assert [(task.name, other.run) for task, other in different] == [("rollout-server", "true")]


def test_a_job_group_of_some_tasks_ends_with_its_first(tmp_path: Path) -> None:
    path = write_job_group(tmp_path, "jobgroup.yaml", {}, only=["rollout-server", "ppo-trainer"])
    assert [(task.name, task.is_primary) for task in spec.load(path).tasks] == [
        ("ppo-trainer", True),
        ("rollout-server", False),
    ]


def test_prompts_that_are_not_shared_are_the_same_work_in_more_groups() -> None:
    shared, apart = Work("", prompts=3, group_size=4), Work("", prompts=3, group_size=4, shares_prompts=False)

    def sequences(work: Work) -> list[tuple[list[int], list[int], float]]:
        return [
            (list(group.prompt_ids), list(sequence.completion_ids), tuple(sequence.advantages))
            for group in work.groups(100, seed=0)
            for sequence in group.sequences
        ]

    assert sequences(shared) == sequences(apart)
    assert len(apart.groups(100, seed=0)) == 12
