"""Engines and trainer on the same node: real processes, a tiny model, weights in shared memory, a killed launcher."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from services.core.machine import memory_of_run
from tests.e2e.system import System

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 6
FIELDS = {"MAX_STEPS": str(STEPS), "MIN_WORKERS": "1", "CHECKPOINT_EVERY": "1", "EVAL_PROMPTS": "0"}


def launchers(run: System) -> list[int]:
    """Return the processes that start and watch the engines of a node."""
    return [process.pid for process in run.processes() if "services.rollout_server" in process.cmdline()]


def test_a_run_on_one_node_survives_the_loss_of_its_engines(tiny_model: Path, tmp_path: Path) -> None:
    run = System(tmp_path, tiny_model, job_group="jobgroups/colocated.yaml", **FIELDS)
    run.wait_for_step(2)
    [launcher] = launchers(run)
    assert psutil.Process(launcher).parent().cmdline()[-2:] == ["-m", "trainer"]
    os.kill(launcher, signal.SIGKILL)
    assert run.wait() == 0, run.text
    assert "ppo-trainer restarting, exit code 33; restart 1" in run.text, "no engine is left to a trainer that goes on"
    assert not (run.run_dir / "logs/rollout-server-0.log").exists()
    assert run.log("ppo-trainer-0").count("memory released") >= STEPS, "engines sleep while the trainer trains"
    records = [record for record in run.metrics() if "loss" in record]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert run.processes() == []
    assert not memory_of_run(run.run_dir / "policy").exists()


@pytest.mark.slow
def test_its_weights_are_those_of_a_run_with_engines_on_other_nodes(tiny_model: Path, tmp_path: Path) -> None:
    nodes = ("--num-nodes", "rollout-server=1", "--num-nodes", "ppo-trainer=1")
    runs = [
        System(tmp_path, tiny_model, *arguments, job_group=job_group, **FIELDS)
        for job_group, arguments in (("jobgroups/colocated.yaml", ()), ("jobgroup.yaml", nodes))
    ]
    assert [run.wait() for run in runs] == [0, 0]
    weights, same = (load_file(run.run_dir / "model/model.safetensors") for run in runs)
    assert all(torch.equal(weights[name], same[name]) for name in same)


@pytest.mark.slow
def test_two_colocated_nodes_share_versions_by_the_volume(tiny_model: Path, tmp_path: Path) -> None:
    fields = FIELDS | {"PUBLISH_TRANSPORT": "disk", "MIN_WORKERS": "2"}
    run = System(tmp_path, tiny_model, "--num-nodes", "ppo-trainer=2", job_group="jobgroups/colocated.yaml", **fields)
    run.wait_for_step(1)
    assert len(launchers(run)) == 2
    assert run.wait() == 0, run.text
    assert [record["workers"] for record in run.metrics() if "loss" in record] == [2] * STEPS
    assert run.processes() == []
