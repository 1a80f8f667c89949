"""SkyPilot's own recovery of our tasks: which exit codes restart them, and what it keeps."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.skypilot_facts import ROOT, SKYPILOT, skypilot_facts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    assert skypilot_facts()  # skips the test where there is no SkyPilot
    done = subprocess.run(
        [SKYPILOT, ROOT / "tests/ask_recovery.py", "jobgroup.yaml", "ppo-trainer"],
        cwd=ROOT,
        env=os.environ | {"HOME": str(tmp_path_factory.mktemp("home"))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_wrong_setting_ends_the_task_at_once(told: dict[str, Any]) -> None:
    for codes in ([78], [78, 137], [34, 78], [70], [137, 137], [139], None):
        assert told["restarts"][str(codes)] == [False, False], codes


def test_a_lost_dependency_and_a_late_pod_restart_it_always(told: dict[str, Any]) -> None:
    for codes in ([33], [33, 137], [1]):
        assert told["restarts"][str(codes)] == [True, True], codes


def test_a_restart_keeps_the_pods_and_their_gpus(told: dict[str, Any]) -> None:
    assert told["healthy"] == ["cancel", ["launch", ["{'H200': 1}"]]]
    assert told["by default"][0] == "delete the pods"


def test_pods_that_do_not_come_back_are_made_anew_with_any_gpu_of_the_file(told: dict[str, Any]) -> None:
    choices = ["{'H100': 1}", "{'H200': 1}", "{'A100-80GB': 1}", "{'L40S': 1}"]
    assert told["gone"] == ["cancel", ["launch", ["{'H200': 1}"]], "delete the pods", ["launch", choices]]
