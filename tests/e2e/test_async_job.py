"""An asynchronous run, whole: jobgroups/async.yaml's tasks as real processes, which train adapters.

One of its engines is killed, and the run is ended by Ctrl-C.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.run_page.directory import Run
from services.weights.policy_store import WEIGHTS_FILE
from tests.e2e.system import System, one_each
from tests.prompts_of_a_run import account
from tests.tolerance import TYPE_VARIABLES, logprob_tolerance, type_in_force
from tests.waiting import IDLE_SECONDS
from trainer.reporting.group_records import GroupRecords

# The limit is for a hang; the first test waits for the whole run, which takes about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

COLLECTORS, MAX_STALENESS, BATCH = 2, 2, 8
TOLERANCE = logprob_tolerance(*map(type_in_force, TYPE_VARIABLES))


@pytest.fixture(scope="module")
def interrupted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A run that has lost an engine and taken it back, and was then interrupted."""
    system = System(
        tmp_path_factory.mktemp("volume"),
        tiny_model,
        # All on 127.0.0.1, as on machines that have no other loopback addresses.
        "--shared-host",
        *("--num-nodes", f"collector={COLLECTORS}", *one_each("ppo-trainer")),
        job_group="jobgroups/async.yaml",
        # As many prompts as no run here uses up; of their answers the tiny model knows only how long they are.
        DATASET_CONFIG='{"digits": [2], "template": "{a}{op}{b}="}',
        REWARD_FN="tests.e2e.rewards:odd_length",
        BATCH_SIZE=str(BATCH),
        MAX_STEPS="1000",
        MAX_STALENESS=str(MAX_STALENESS),
        REPLAY_GROUPS="0",
        EVAL_PROMPTS="8",
        RECORD_GROUPS="all",
        LORA_RANK="4",
        LEARNING_RATE="1e-3",
        PUBLISH_TRANSPORT="broadcast",
        PUBLISH_TYPE="float32",
    )
    try:
        system.wait_until(lambda: workers(system)[-1:] == [2], "both engines have the newest adapters")
        [engine] = [
            one for one in system.processes_of("rollout-server-1") if "embedded_engine" in " ".join(one.cmdline())
        ]
        engine.kill()
        steps = len(workers(system))
        system.wait_until(lambda: 1 in workers(system)[steps:], "a step without the engine")
        system.wait_until(lambda: workers(system)[-1:] == [2], "the engine is back")
        system.wait_for_step(len(workers(system)) + 1)
        system.process.send_signal(signal.SIGINT)
        assert system.wait() == 130, system.text
        yield system
    finally:
        if system.process.poll() is None:
            system.process.terminate()
            system.process.wait(IDLE_SECONDS)


def workers(system: System) -> list[int]:
    """Return how many engines had the newest adapters at the end of each step."""
    # What is published last is nobody's any more when the run is interrupted.
    return [record["workers"] for record in system.metrics() if "workers" in record]


def last_step(system: System) -> int:
    return system.metrics()[-1]["step"]


def test_ctrl_c_ends_every_process_and_leaves_a_checkpoint_of_the_last_step(interrupted: System) -> None:
    assert interrupted.processes() == []
    checkpoints = [path.name for path in (interrupted.run_dir / "checkpoints").iterdir()]
    assert f"step-{last_step(interrupted):06d}" in checkpoints
    assert Run(interrupted.run_dir).state == "interrupted"


def test_every_step_has_its_record_whatever_engine_was_lost(interrupted: System) -> None:
    assert [record["step"] for record in interrupted.metrics()] == list(range(1, last_step(interrupted) + 1))


def test_a_killed_engine_is_started_again_by_its_node_alone(interrupted: System) -> None:
    assert "restarting" not in interrupted.text
    log = interrupted.log("rollout-server-1")
    assert log.count("=== ") == 1, "the node itself started once"
    assert "child ended child=engine-0 how='was ended by SIGKILL'" in log
    assert {1, 2} == set(workers(interrupted))


def test_no_group_is_older_than_allowed_and_some_are_not_of_the_newest_policy(interrupted: System) -> None:
    staleness = [record["staleness_max"] for record in interrupted.metrics()]
    assert 0 < max(staleness) <= MAX_STALENESS, "with 0 nothing was generated while the trainer trained"


def test_every_step_is_computed_again_to_the_bit(interrupted: System) -> None:
    assert interrupted.verify() == list(range(1, last_step(interrupted) + 1))


def test_every_group_is_trained_on_once(interrupted: System) -> None:
    trained = {(sample["step"], sample["group_id"]) for sample in interrupted.samples()}
    steps = last_step(interrupted)
    assert len(trained) == len({group for _, group in trained}) == steps * BATCH
    records = GroupRecords(interrupted.run_dir)
    recorded = [(step, found.group.group_id) for step in records.steps for found in records.groups(step)]
    assert len(recorded) == steps * BATCH
    assert set(recorded) == trained


def test_each_prompt_is_taken_by_one_collector_and_none_is_left_out(interrupted: System) -> None:
    counted = account(interrupted.run_dir)
    assert counted.taken >= last_step(interrupted) * BATCH
    assert (counted.doubled, counted.left_out) == (0, 0)


def test_collectors_take_no_more_prompts_than_can_be_trained_on_in_time(interrupted: System) -> None:
    # Collectors that each kept a whole queue in flight would waste most of what they make. A group that takes longer
    # than those begun after it may still come too late. Those that a lost engine had begun do, however many they are,
    # so the steps without it do not count.
    undisturbed = [record for record in interrupted.metrics() if record.get("workers") == 2]
    dropped = sum(record["groups_dropped_stale"] for record in undisturbed)
    assert dropped <= len(undisturbed) * BATCH / 4


def test_engines_compute_with_the_adapters_of_each_version_as_the_trainer_does(interrupted: System) -> None:
    records = interrupted.metrics()
    assert [record["policy_version"] for record in records] == [record["step"] for record in records]
    of_newest = [
        record["kl_behaviour"] for record in records if record["staleness_max"] == 0 and "kl_behaviour" in record
    ]
    assert of_newest
    assert all(abs(difference) < TOLERANCE for difference in of_newest)


def test_adapters_of_every_projection_are_trained_and_of_nothing_else(interrupted: System) -> None:
    newest = max((interrupted.run_dir / "policy").iterdir())
    tensors = load_file(newest / WEIGHTS_FILE)
    assert all(bool(torch.any(tensor != 0)) for tensor in tensors.values())
    assert {name.split(".")[-3] for name in tensors} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
