"""The asynchronous job, whole: jobgroups/async.yaml's tasks as real processes, with several collectors."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.e2e.system import System
from tests.prompts_of_a_run import account
from trainer.reporting.group_records import GroupRecords

# The limit is for a hang; a run takes about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS, COLLECTORS, MAX_STALENESS, BATCH = 6, 2, 2, 8


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> System:
    """A run with two collectors, in which every group trained on is among the samples."""
    nodes = {"collector": COLLECTORS, "rollout-server": 1, "ppo-trainer": 1}
    system = System(
        tmp_path_factory.mktemp("volume"),
        tiny_model,
        *(option for task, count in nodes.items() for option in ("--num-nodes", f"{task}={count}")),
        job_group="jobgroups/async.yaml",
        BATCH_SIZE=str(BATCH),
        MAX_STEPS=str(STEPS),
        MAX_STALENESS=str(MAX_STALENESS),
        REPLAY_GROUPS="0",
    )
    assert system.wait() == 0, system.text
    return system


@pytest.mark.slow
def test_the_asynchronous_job_trains_to_the_end_and_leaves_no_process(finished: System) -> None:
    assert finished.summary()["status"] == "succeeded"
    assert [record["step"] for record in finished.metrics()] == list(range(1, STEPS + 1))
    assert finished.processes() == []


@pytest.mark.slow
def test_no_group_is_older_than_allowed_and_some_are_not_of_the_newest_policy(finished: System) -> None:
    staleness = [record["staleness_max"] for record in finished.metrics()]
    assert max(staleness) <= MAX_STALENESS
    assert max(staleness) > 0, "nothing was generated while the trainer trained"


@pytest.mark.slow
def test_every_step_is_computed_again_to_the_bit(finished: System) -> None:
    [line] = finished.verify()
    assert line.startswith("equal to the bit: "), line
    assert f"steps 1 to {STEPS} and the " in line


@pytest.mark.slow
def test_every_group_is_trained_on_once(finished: System) -> None:
    samples = [orjson.loads(line) for line in (finished.run_dir / "samples.jsonl").read_bytes().splitlines()]
    trained = {(sample["step"], sample["group_id"]) for sample in samples}
    assert len(trained) == STEPS * BATCH
    assert len({group for _, group in trained}) == STEPS * BATCH
    records = GroupRecords(finished.run_dir)
    recorded = [(step, found.group.group_id) for step in records.steps for found in records.groups(step)]
    assert set(recorded) == trained
    assert len(recorded) == STEPS * BATCH


@pytest.mark.slow
def test_collectors_take_no_more_prompts_than_can_be_trained_on_in_time(finished: System) -> None:
    # Collectors that each kept a whole queue in flight would waste most of what they make. A group that takes longer
    # than those begun after it may still come too late.
    assert sum(record["groups_dropped_stale"] for record in finished.metrics()) <= STEPS * BATCH / 4


@pytest.mark.slow
def test_two_dozen_collectors_one_of_which_is_killed_take_each_prompt_once(tiny_model: Path, tmp_path: Path) -> None:
    nodes = {"collector": 24, "rollout-server": 1, "ppo-trainer": 1}
    system = System(
        tmp_path,
        tiny_model,
        *(option for task, count in nodes.items() for option in ("--num-nodes", f"{task}={count}")),
        job_group="jobgroups/async.yaml",
        ARITHMETIC_DIGITS="2",
        BATCH_SIZE=str(BATCH),
        MAX_STEPS="30",
        MAX_STALENESS=str(MAX_STALENESS),
        REPLAY_GROUPS="0",
        EVAL_PROMPTS="0",
    )
    system.wait_for_step(3)
    system.kill("collector-5")
    assert system.wait() == 0, system.text
    assert "restart" in system.text
    assert [record["step"] for record in system.metrics()] == list(range(1, 31))
    counted = account(system.run_dir)
    assert counted.taken >= 30 * BATCH
    assert (counted.doubled, counted.left_out) == (0, 0)
    assert system.processes() == []
