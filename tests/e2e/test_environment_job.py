"""A job group that trains on an environment, whole: jobgroups/environment.yaml's tasks as real processes."""

from __future__ import annotations

import math
from pathlib import Path

import orjson
import pytest

from tests.e2e.system import System

# The limit is for a hang; a run takes about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS, BATCH, GROUP = 2, 2, 4


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> System:
    system = System(
        tmp_path_factory.mktemp("volume"),
        tiny_model,
        *("--num-nodes", "rollout-server=1", "--num-nodes", "ppo-trainer=1"),
        job_group="jobgroups/environment.yaml",
        JOBGROUP_TOKEN="of-the-job-group",
        ENVIRONMENT="tests.e2e.agents:Moods",
        ADVANTAGE="gae",
        DATASET="seeds",
        MAX_NEW_TOKENS="4",
        BATCH_SIZE=str(BATCH),
        GROUP_SIZE=str(GROUP),
        MAX_STEPS=str(STEPS),
        EVAL_PROMPTS="4",
        PUBLISH_TYPE="float32",
    )
    assert system.wait() == 0, system.text
    return system


def test_an_environment_is_trained_on_to_the_end(finished: System) -> None:
    assert finished.summary()["status"] == "succeeded"
    records = finished.metrics()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(record["turns_mean"] == 3 and record["grad_norm"] > 0 for record in records)
    assert all(record["episodes_failed"] == 0 for record in records)
    assert all(abs(math.log(record["ratio_max"])) < 1e-4 for record in records)
    assert finished.summary()["accuracy_after"] is not None
    assert finished.processes() == []


def test_the_rewards_are_the_environments_by_turn(finished: System) -> None:
    samples = [orjson.loads(line) for line in (finished.run_dir / "samples.jsonl").read_bytes().splitlines()]
    trained = [sample for sample in samples if sample["step"] > 0]
    assert len(trained) == STEPS * BATCH * GROUP
    for sample in trained:
        assert len(sample["turn_rewards"]) == 3
        assert sum(sample["turn_rewards"]) == pytest.approx(sample["reward"])
        said = [len(m.get("content", "")) % 2 for m in sample["messages"] if m["role"] == "assistant"]
        assert sample["turn_rewards"] == pytest.approx([0.5 * parity for parity in said])


def test_the_servers_settings_are_on_record(finished: System) -> None:
    components = orjson.loads((finished.run_dir / "config.json").read_bytes())["components"]
    assert components["environment-server"]["settings"]["environment"] == "tests.e2e.agents:Moods"
