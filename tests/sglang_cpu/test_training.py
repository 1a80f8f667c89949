"""Training steps of the whole job group against two real SGLang workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.system import System
from tests.services.rollout_server.conftest import check_installed
from tests.services.rollout_server.nodes import SGLANG_FLAGS, SGLANG_PYTHON
from tests.tolerance import TYPE_VARIABLES, logprob_tolerance, type_in_force

# Two real workers take minutes to start on a machine of two cores.
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

STEPS = 3
TOLERANCE = logprob_tolerance(*map(type_in_force, TYPE_VARIABLES))


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["whole", "adapters"])
@pytest.mark.parametrize("transport", ["disk", "broadcast"])
def test_three_steps_are_trained_on_what_real_workers_generate(
    tiny_model: Path, tmp_path: Path, transport: str, lora_rank: int
) -> None:
    check_installed("sglang")
    system = System(
        tmp_path,
        tiny_model,
        *("--num-nodes", "ppo-trainer=1"),
        MAX_STEPS=str(STEPS),
        ROLLOUT_ENGINE="sglang",
        SGLANG_PYTHON=str(SGLANG_PYTHON),
        SGLANG_EXTRA_FLAGS=SGLANG_FLAGS,
        MIN_WORKERS="2",
        SERVICE_DEADLINE_SECONDS="900",
        PUBLISH_TRANSPORT=transport,
        PUBLISH_TYPE="float32",
        LORA_RANK=str(lora_rank),
        ENGINE_SLEEPS=str(transport == "disk"),
        EVAL_PROMPTS="8",
    )
    assert system.wait(limit_seconds=1100) == 0, system.text
    records = [record for record in system.metrics() if "loss" in record]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["workers"] == 2
        assert record["probe_difference"] < TOLERANCE
        assert record["policy_version"] == record["step"]
        # On-policy, so what the workers say of their tokens is what the trainer computes.
        assert abs(record["kl_behaviour"]) < TOLERANCE
    assert system.summary()["status"] == "succeeded"
    assert system.processes() == []
