"""The preflight's bytes of a GPU are those that a step allocates, counted on the pretended device at the size of 8B.

A layer's activations are those that the compiled layer keeps. A whole step is counted without the compiler, because
the tracker does not see compiled code, and compared with the bytes of layers that are not compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from transformers import Gemma2Config, GptOssConfig, PretrainedConfig, Qwen3MoeConfig

from tests.pretend_cuda.compiled import kept_bytes
from tests.pretend_cuda.learner import (
    bytes_of_device,
    preflight,
    tracked_pass,
    without_compilation,
)
from trainer.capacity.need import CUDA_CONTEXT, stored_bytes, uncompiled_layer_bytes
from trainer.capacity.shape import CONFIGS, ModelShape
from trainer.capacity.work import Limits, Machine, work_of
from trainer.config import TrainerSettings
from trainer.config.sections import Checkpointing

pytestmark = pytest.mark.cuda

RANKS = 8
TOKENS, SEQUENCE = 16_384, 2048
DEPTHS = (2, 5)


@dataclass(frozen=True)
class Step:
    peak: int
    """Bytes of the device at the fullest moment."""
    expected: int


@pytest.fixture
def _without_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what autograd keeps without a compiler, and expect that."""
    without_compilation(monkeypatch)
    monkeypatch.setattr("trainer.capacity.need.layer_bytes", uncompiled_layer_bytes)


def step(config: PretrainedConfig, *, has_checkpointing: bool) -> Step:
    settings = settings_of(has_checkpointing=has_checkpointing)
    with tracked_pass(config, settings, TOKENS, SEQUENCE, gpus=RANKS) as tracked:
        peak = bytes_of_device(tracked.tracker, "peak")
    return Step(peak, forecast(config, settings))


def settings_of(*, has_checkpointing: bool) -> TrainerSettings:
    return TrainerSettings.load(
        activation_checkpointing=has_checkpointing, shard_parameters=True, batch_size=256, group_size=16,
        micro_batch_tokens=TOKENS,
    )  # fmt: skip


def forecast(config: PretrainedConfig, settings: TrainerSettings) -> int:
    """Return the preflight's bytes of a GPU in the first forward and backward pass, before which no gradients exist."""
    need = preflight(config, settings, RANKS)
    return need.total("device") - (need.device["gradients"] + need.device["moments"] + CUDA_CONTEXT)


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    return type(config)(**{**config.to_dict(), "num_hidden_layers": layers, "layer_types": None})


@pytest.mark.usefixtures("_without_compilation")
@pytest.mark.parametrize("has_checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("label", ["0.5B", "8B"])
def test_a_step_takes_the_bytes_that_the_preflight_says(label: str, has_checkpointing: bool) -> None:
    config = CONFIGS[label][1]
    few, more = (step(with_layers(config, n), has_checkpointing=has_checkpointing) for n in DEPTHS)
    assert more.peak == pytest.approx(more.expected, rel=0.15)
    assert more.peak < more.expected * 1.02, "too little memory is asked for"
    # The tracker takes minutes for all layers, each of which adds the same.
    per_layer = (more.peak - few.peak) / (DEPTHS[1] - DEPTHS[0])
    peak = more.peak + (config.num_hidden_layers - DEPTHS[1]) * per_layer
    expected = forecast(config, settings_of(has_checkpointing=has_checkpointing))
    assert peak == pytest.approx(expected, rel=0.15)
    assert peak < expected * 1.02, "too little memory is asked for all layers"


MIXTURE = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=2048,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
)
"""Qwen3-30B-A3B."""
OTHERS = {"mixture": MIXTURE, "caps": Gemma2Config(), "sinks": GptOssConfig()}
"""By default those of Gemma 2 9B and gpt-oss-20b."""


@pytest.mark.parametrize(
    ("label", "checkpointing"),
    [
        *((label, False) for label in ("0.5B", "7B", "8B", "mixture", "caps", "sinks")),
        *((label, "selective") for label in ("0.5B", "1.5B", "7B", "8B", "32B", "mixture")),
    ],
)
def test_a_compiled_layer_keeps_the_bytes_that_the_preflight_says(label: str, checkpointing: Checkpointing) -> None:
    config = OTHERS[label] if label in OTHERS else CONFIGS[label][1]
    shape = ModelShape.of(config)
    settings = TrainerSettings.load(activation_checkpointing=checkpointing)
    work = work_of(settings, shape, Machine(1, RANKS, 2, Limits(80 * 10**9, 0, 0, 0)))
    share = kept_bytes(config, TOKENS, SEQUENCE, checkpointing) / TOKENS / stored_bytes(shape, work)
    least = 0.93 if label == "sinks" else 0.998  # of experts with biases an upper bound is known
    assert least < share < 1.001, "too much or too little memory is asked for"
