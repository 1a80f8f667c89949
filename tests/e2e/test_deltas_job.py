"""A run whose versions are deltas equals the run with whole versions to the bit, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.weights.policy_store import PolicyStore, is_delta
from tests.e2e.system import System
from tests.e2e.test_fork import metrics, samples

# The limit is for a hang; the two runs take about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.leaving, pytest.mark.timeout(900)]

STEPS = 5
OWN = {"publish_bytes", "publish_whole_bytes", "publish_changed"}


def test_deltas_change_no_weight_and_no_token(tiny_model: Path, tmp_path: Path) -> None:
    runs = []
    for delta in ("false", "true"):
        settings = {"MAX_STEPS": str(STEPS), "EVAL_PROMPTS": "4", "LEARNING_RATE": "1e-6", "PUBLISH_DELTA": delta}
        system = System(tmp_path, tiny_model, "--small", run_id=f"delta-{delta}", **settings)
        assert system.wait() == 0, system.text
        runs.append(system)
    whole, deltas = runs
    lines = [{name: x for name, x in line.items() if name not in OWN} for line in metrics(deltas.run_dir)]
    assert lines == metrics(whole.run_dir)
    assert len(lines) == STEPS
    assert samples(deltas.run_dir) == samples(whole.run_dir)
    weights = "model/model.safetensors"
    assert (deltas.run_dir / weights).read_bytes() == (whole.run_dir / weights).read_bytes()
    versions = PolicyStore(deltas.run_dir / "policy").published()
    assert [(policy.version, is_delta(policy.path)) for policy in versions] == [
        (0, False),
        *((version, True) for version in range(1, STEPS + 1)),
    ]
    assert all(record["publish_bytes"] < record["publish_whole_bytes"] / 3 for record in deltas.metrics())
    assert "published=" in deltas.log("ppo-trainer-0")
