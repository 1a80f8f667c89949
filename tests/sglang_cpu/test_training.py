"""Training steps of the whole job group against real SGLang workers, whose weights are proven at each publication."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.e2e.system import System
from tests.families import TINY
from tests.services.rollout_server.conftest import check_installed
from tests.services.rollout_server.nodes import SGLANG_FLAGS, SGLANG_PYTHON
from tests.tolerance import TYPE_VARIABLES, logprob_tolerance, type_in_force
from toys.arithmetic import SIZES, make

# Two real workers take minutes to start on a machine of two cores.
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

STEPS = 3
TOLERANCE = logprob_tolerance(*map(type_in_force, TYPE_VARIABLES))


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["whole", "adapters"])
@pytest.mark.parametrize("transport", ["disk", "broadcast"])
def test_three_steps_are_trained_on_what_real_workers_generate(
    tiny_model: Path, tmp_path: Path, transport: str, lora_rank: int
) -> None:
    settings = {"LORA_RANK": str(lora_rank), "ENGINE_SLEEPS": str(transport == "disk")}
    records = trained(tmp_path, tiny_model, 2, PUBLISH_TRANSPORT=transport, **settings)
    # Checksums prove weights; an adapter is proven by answers alone.
    assert [record["workers_proven"] for record in records] == [0 if lora_rank else 2] * STEPS


@pytest.mark.parametrize("kind", ["lfm2", "olmo3"])
def test_a_family_is_trained_on_what_a_real_worker_generates(tmp_path: Path, kind: str) -> None:
    """A model with short convolutions, whose kernels Triton interprets in float32 only, and one with windows."""
    options = SIZES | {"num_hidden_layers": 2} | TINY[kind]
    make(tmp_path / "model", config=AutoConfig.for_model(kind, **options))
    if kind == "olmo3":
        # As on the hub. transformers writes a base for each type of layer, and SGLang then takes a default.
        file = tmp_path / "model" / "config.json"
        config = json.loads(file.read_text())
        config["rope_theta"] = config.pop("rope_parameters")["full_attention"]["rope_theta"]
        file.write_text(json.dumps(config))
    types = dict.fromkeys(TYPE_VARIABLES, "float32")
    records = trained(tmp_path, tmp_path / "model", 1, **types)
    assert [record["workers_proven"] for record in records] == [1] * STEPS


def trained(directory: Path, model: Path, workers: int, **settings: str) -> list[dict[str, Any]]:
    """Train a few steps on what real workers generate; return their records."""
    check_installed("sglang")
    system = System(
        directory,
        model,
        *("--num-nodes", "ppo-trainer=1", "--num-nodes", f"rollout-server={workers}"),
        MAX_STEPS=str(STEPS),
        ROLLOUT_ENGINE="sglang",
        SGLANG_PYTHON=str(SGLANG_PYTHON),
        SGLANG_EXTRA_FLAGS=SGLANG_FLAGS,
        MIN_WORKERS=str(workers),
        SERVICE_DEADLINE_SECONDS="900",
        PUBLISH_TYPE="float32",
        EVAL_PROMPTS="8",
        **settings,
    )
    assert system.wait(limit_seconds=1100) == 0, system.text
    records = [record for record in system.metrics() if "loss" in record]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["workers"] == workers
        assert record["probe_difference"] < TOLERANCE
        assert record["policy_version"] == record["step"]
        # On-policy, so what the workers say of their tokens is what the trainer computes.
        assert abs(record["kl_behaviour"]) < TOLERANCE
    assert system.summary()["status"] == "succeeded"
    assert system.processes() == []
    return records
