"""Whole runs of families: each learns, is killed and resumes to the bit, and the engine serves its weights."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.e2e.system import System, one_each
from tests.families import KINDS, TINY
from toys.arithmetic import SIZES, make

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

STEPS = 32
OTHERWISE = {
    "cohere": {"logit_scale": 0.3},
    "granitemoehybrid": {"mamba_n_heads": 12},
    "qwen3_moe": {"layer_types": None},
}
"""Options of models that learn, which are three times as wide as the tiny ones, and sample while they are made."""
IN_TEST_ALL = ("gpt_oss", "lfm2")
"""Windows, sinks and experts; short convolutions."""


def marked(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.slow if kind in IN_TEST_ALL else pytest.mark.models


@pytest.mark.parametrize(
    ("kind", "lora_rank"),
    [
        *(pytest.param(kind, 0, id=kind, marks=marked(kind)) for kind in KINDS),
        pytest.param("qwen3_5_text", 8, id="qwen3_5_text-adapters", marks=pytest.mark.models),
    ],
)
def test_a_family_learns_and_resumes_to_the_bit(tmp_path: Path, kind: str, lora_rank: int) -> None:
    # The tiny ones have two layers.
    twice = {name: value * 2 for name, value in TINY[kind].items() if isinstance(value, list)}
    options = SIZES | TINY[kind] | twice | OTHERWISE.get(kind, {})
    make(tmp_path / "model", config=AutoConfig.for_model(kind, **options))
    system = System(
        tmp_path,
        tmp_path / "model",
        *one_each("ppo-trainer", "rollout-server"),
        run_id="family",
        BATCH_SIZE="16",
        GROUP_SIZE="16",
        LEARNING_RATE="1e-3" if lora_rank else "1e-4",
        LORA_RANK=str(lora_rank),
        MAX_STEPS=str(STEPS),
        REPLAY_GROUPS="0",
        CHECKPOINT_EVERY="4",
        RECORD_GROUPS="all",
        PUBLISH_TYPE="float32",
        COMPUTE_TYPE="float32",
        ENGINE_DTYPE="float32",
    )
    system.wait_until(lambda: any(system.run_dir.glob("checkpoints/step-*")), "a checkpoint")
    system.kill("ppo-trainer-0")
    assert system.wait(limit_seconds=1200) == 0, system.text
    assert re.search(r"resumed .*?step=\d+", system.log("ppo-trainer-0"))
    records = system.metrics()
    rewards = [record["reward_mean"] for record in records]
    assert len(rewards) == STEPS
    assert statistics.mean(rewards[-8:]) > statistics.mean(rewards[:8]) + 0.03, rewards
    assert all(record["kl_behaviour"] < 1e-6 for record in records)
    assert system.verify() == list(range(1, STEPS + 1))
    if lora_rank:
        assert all(record["probe_delivered"] == pytest.approx(1, abs=0.05) for record in records[1:])
        return
    # The engine's digests of all tensors are those of the trainer's.
    assert {record["workers_proven"] for record in records} == {1}
    published, saved = (load_file(system.run_dir / d / "model.safetensors") for d in (f"policy/v{STEPS:06d}", "model"))
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], saved[name]) for name in saved)
