"""A run of a family that transformers computes, in trainer and engine: it learns, and resumes to the bit."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.e2e.system import System, one_each
from toys.arithmetic import SIZES, make

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 16


def test_a_model_with_convolutions_learns_and_resumes_to_the_bit(tmp_path: Path) -> None:
    layers = ["conv", "full_attention"] * (SIZES["num_hidden_layers"] // 2)
    make(tmp_path / "model", config=AutoConfig.for_model("lfm2", **SIZES, layer_types=layers))
    system = System(
        tmp_path,
        tmp_path / "model",
        *one_each("ppo-trainer", "rollout-server"),
        run_id="hybrid",
        BATCH_SIZE="16",
        GROUP_SIZE="16",
        LEARNING_RATE="2e-4",
        MAX_STEPS=str(STEPS),
        REPLAY_GROUPS="0",
        CHECKPOINT_EVERY="2",
        RECORD_GROUPS="all",
        PUBLISH_TYPE="float32",
        COMPUTE_TYPE="float32",
        ENGINE_DTYPE="float32",
    )
    system.wait_until(lambda: any(system.run_dir.glob("checkpoints/step-*")), "a checkpoint")
    system.kill("ppo-trainer-0")
    assert system.wait() == 0, system.text
    assert re.search(r"resumed .*?step=\d+", system.log("ppo-trainer-0"))
    rewards = [record["reward_mean"] for record in system.metrics()]
    assert len(rewards) == STEPS
    assert statistics.mean(rewards[-4:]) > statistics.mean(rewards[:4]) + 0.05, rewards
    assert all(record["kl_behaviour"] < 1e-6 for record in system.metrics())
    assert system.verify() == list(range(1, STEPS + 1))
