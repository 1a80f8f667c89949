"""`grpo chaos` on whole job groups: every component is killed, and the run ends with the weights of the quiet one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.system import ROOT, SETTINGS

# The limit is for a hang; the three runs take about six minutes.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 16
COMPONENTS = {"ppo-trainer", "data-server", "rollout-server", "reward-server", "replay-buffer"}


def chaos(shared_dir: Path, model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    variables = SETTINGS | {"MODEL_NAME": str(model), "EVAL_PROMPTS": "0", "CHECKPOINT_EVERY": "3"}
    settings = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    command = [sys.executable, "-m", "scripts.grpo", "chaos", "jobgroup.yaml", "--small", *settings, *options]
    return subprocess.run(
        [*command, "--shared-dir", str(shared_dir)], cwd=ROOT, capture_output=True, text=True, timeout=1700
    )


def test_a_run_whose_every_component_is_killed_equals_the_quiet_one_and_other_weights_are_noticed(
    tiny_model: Path, tmp_path: Path
) -> None:
    length = ("--env", f"MAX_STEPS={STEPS}")
    often = ("--every", "2s", "--for", "20m")
    done = chaos(tmp_path, tiny_model, *length, *often, "--fault", "kill", "--run-id", "disturbed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# Chaos: disturbed passed" in done.stdout
    assert "- weights: equal to the bit to those of disturbed-quiet: model/model.safetensors" in done.stdout
    certificate = json.loads((tmp_path / "runs/disturbed/chaos.json").read_text())
    kills = Counter(strike["fault"]["node"].removesuffix("-0") for strike in certificate["faults"])
    assert kills.keys() == COMPONENTS
    restarts = certificate["outcome"]["restarts"]
    assert all(restarts[task] >= count for task, count in kills.items()), (restarts, kills)
    assert (certificate["trained_twice"], certificate["groups"]) == ([], STEPS * 8)

    quiet = tmp_path / "runs/disturbed-quiet/model/model.safetensors"
    weights = bytearray(quiet.read_bytes())
    weights[-1] ^= 1
    quiet.write_bytes(weights)
    stops = ("--every", "2s", "--for", "4s", "--fault", "stop", "--quiet", "disturbed-quiet")
    done = chaos(tmp_path, tiny_model, *length, *stops, "--run-id", "stopped")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "# Chaos: stopped FAILED" in done.stdout
    assert "- **different from those of disturbed-quiet: model/model.safetensors**" in done.stdout
