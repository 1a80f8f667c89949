"""The main job with LoRA adapters, whole: real processes, a tiny model, two workers, a merged model at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.weights.policy_store import CONFIG_FILE, WEIGHTS_FILE
from tests.e2e.system import System
from tests.tolerance import TYPE_VARIABLES, logprob_tolerance, type_in_force

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 4
TOLERANCE = logprob_tolerance(*map(type_in_force, TYPE_VARIABLES))


@pytest.mark.parametrize(
    ("transport", "in_place", "sleeps"),
    [("disk", "false", True), pytest.param("broadcast", "true", False, marks=pytest.mark.slow)],
)
def test_workers_generate_with_the_adapters_of_each_step(
    tiny_model: Path, tmp_path: Path, transport: str, in_place: str, sleeps: bool
) -> None:
    system = System(
        tmp_path,
        tiny_model,
        MAX_STEPS=str(STEPS),
        MIN_WORKERS="2",
        LORA_RANK="4",
        LEARNING_RATE="1e-3",
        PUBLISH_TRANSPORT=transport,
        PUBLISH_TYPE="float32",
        PUBLISH_IN_PLACE=in_place,
        ENGINE_SLEEPS=str(sleeps),
    )
    assert system.wait() == 0, system.text
    for rank in (0, 1):
        log = (system.run_dir / "logs" / f"rollout-server-{rank}.log").read_text()
        for told in ("memory released", "memory taken back"):
            assert log.count(told) == STEPS * sleeps, "while the trainer trains, and at no other time"
    records = [record for record in system.metrics() if "loss" in record]
    assert [record["policy_version"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["workers"] == 2
        assert record["probe_delivered"] == pytest.approx(1, abs=0.01)
        # On-policy: what workers say of their tokens is what the trainer computes with the adapters.
        assert abs(record["kl_behaviour"]) < TOLERANCE
    for version in (system.run_dir / "policy").iterdir():
        assert {path.name for path in version.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}
    before, after = (load_file(path / "model.safetensors") for path in (tiny_model, system.run_dir / "model"))
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    changed = {name for name in before if not torch.equal(before[name].float(), after[name])}
    assert {name.split(".")[-2] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
