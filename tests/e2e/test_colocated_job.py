"""Engines and trainer on the same nodes: real processes, a tiny model, weights in shared memory, a killed launcher."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from services.core.machine import memory_directory, memory_of_run
from tests.e2e.system import System

# The limit is for a hang; a run takes about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 8
FIELDS = {
    "MAX_STEPS": str(STEPS),
    "MIN_WORKERS": "1",
    "CHECKPOINT_EVERY": "1",
    "EVAL_PROMPTS": "0",
    "RECORD_GROUPS": "all",
    "PUBLISH_TYPE": "float32",
}


@pytest.fixture(scope="module")
def disturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> System:
    """A run on one node that has lost its engines on the way."""
    volume = tmp_path_factory.mktemp("volume")
    run = System(volume, tiny_model, job_group="jobgroups/colocated.yaml", PROFILE_STEPS=f"{STEPS}", **FIELDS)
    run.wait_for_step(2)
    [launcher] = [process.pid for process in run.processes() if "services.rollout_server" in process.cmdline()]
    assert psutil.Process(launcher).parent().cmdline()[-2:] == ["-m", "trainer"]
    os.kill(launcher, signal.SIGKILL)
    assert run.wait() == 0, run.text
    return run


def test_a_run_on_one_node_survives_the_loss_of_its_engines(disturbed: System) -> None:
    told = "ppo-trainer restarting, exit code 33; restart 1"
    assert told in disturbed.text, "no engine is left to a trainer that goes on"
    assert not (disturbed.run_dir / "logs/rollout-server-0.log").exists()
    before, after = disturbed.log("ppo-trainer-0").split("resumed checkpoint=", 1)
    # The launcher may be killed between the answers of a step and the sleep of its engines.
    resumed_from = int(re.search(r" step=(\d+)", after)[1])
    assert before.count("memory released") >= 2, "engines sleep while the trainer trains"
    assert after.count("memory released") == STEPS - resumed_from, "those of the second launcher, too"
    assert [record["step"] for record in disturbed.metrics() if "loss" in record] == list(range(1, STEPS + 1))
    assert disturbed.processes() == []
    assert not [*memory_directory().glob(f"{memory_of_run(disturbed.run_dir / 'policy').name}*")]


def test_its_engines_have_the_trainers_weights_and_its_steps_are_computed_again_to_the_bit(disturbed: System) -> None:
    records = disturbed.metrics()
    assert all(abs(math.log(record["ratio_max"])) < 1e-4 for record in records if "ratio_max" in record)
    assert sum("ratio_max" in record for record in records) >= STEPS - 1
    assert disturbed.verify() == list(range(1, STEPS + 1))


def test_a_profiled_step_shows_when_each_group_was_generated_and_scored(disturbed: System) -> None:
    directory = disturbed.run_dir / "profile" / f"from-step-{STEPS}"
    events = json.loads((directory / "timeline.json").read_bytes())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M"}
    groups = {f"group {sample['group_id']}" for sample in disturbed.samples() if sample["step"] == STEPS}
    assert groups
    assert tracks >= groups
    assert b"aten::" in gzip.decompress((directory / "trace.json.gz").read_bytes())
