"""The developers' tool for faults, on a whole job group."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos import main, task_of
from tests.e2e.system import SETTINGS


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1800)  # for a hang; the two runs take about four minutes
def test_a_run_whose_every_component_is_killed_has_the_weights_of_the_quiet_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    variables = SETTINGS | {"MODEL_NAME": str(tiny_model), "EVAL_PROMPTS": "0", "CHECKPOINT_EVERY": "3"}
    variables["MAX_STEPS"] = "40"
    settings = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    arguments = ["--every", "1", "--length", "5", "--fault", "kill", "--shared-dir", str(tmp_path)]
    assert main(["jobgroup.yaml", *arguments, "--small", *settings]) == 0
    certificate = json.loads((tmp_path / "runs/disturbed/chaos.json").read_text())
    components = {"ppo-trainer", "data-server", "rollout-server", "reward-server", "replay-buffer"}
    assert Counter(task_of(strike["fault"]["node"]) for strike in certificate["faults"]) == dict.fromkeys(components, 1)
    assert certificate["restarts"].keys() == components
    assert (certificate["trained_twice"], certificate["groups"]) == ([], 40 * 8)
    assert certificate["weights_equal"] is True
