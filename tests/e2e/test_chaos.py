"""`grpo chaos` on whole job groups: every component is killed, and the run ends with the weights of the quiet one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.system import ROOT, SETTINGS

# The limit is for a hang; the two runs take about four minutes.
pytestmark = [pytest.mark.e2e, pytest.mark.leaving, pytest.mark.timeout(1800)]

STEPS = 40
COMPONENTS = {"ppo-trainer", "data-server", "rollout-server", "reward-server", "replay-buffer"}


def test_a_run_whose_every_component_is_killed_has_the_weights_of_the_quiet_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    variables = SETTINGS | {"MODEL_NAME": str(tiny_model), "EVAL_PROMPTS": "0", "CHECKPOINT_EVERY": "3"}
    variables["MAX_STEPS"] = str(STEPS)
    settings = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    plan = ("--every", "1s", "--for", "5s", "--fault", "kill", "--run-id", "disturbed", "--shared-dir", str(tmp_path))
    command = [sys.executable, "-m", "scripts.grpo", "chaos", "jobgroup.yaml", "--small", *settings, *plan]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# Chaos: disturbed passed" in done.stdout
    assert "- weights: equal to the bit to those of disturbed-quiet: model/model.safetensors" in done.stdout
    certificate = json.loads((tmp_path / "runs/disturbed/chaos.json").read_text())
    kills = Counter(strike["fault"]["node"].removesuffix("-0") for strike in certificate["faults"])
    assert kills == dict.fromkeys(COMPONENTS, 1)
    assert certificate["outcome"]["restarts"].keys() == COMPONENTS
    assert (certificate["trained_twice"], certificate["groups"]) == ([], STEPS * 8)
