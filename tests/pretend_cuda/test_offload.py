"""CPU_OFFLOAD on the pretended device: where the bytes are, and that copies do not wait."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.pretend_cuda.learner import (
    bytes_of_device,
    packed_sequences,
    preflight,
    pretended_policy,
    pretended_ranks,
    tracked_pass,
    without_compilation,
)
from tests.pretend_cuda.seen import Seen
from tests.pretend_cuda.test_memory import RANKS, SEQUENCE, TOKENS, with_layers
from tests.pretend_cuda.test_step import is_copy_to_the_device
from trainer.capacity.need import CUDA_CONTEXT, uncompiled_layer_bytes
from trainer.capacity.shape import CONFIGS
from trainer.config import TrainerSettings

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Leave layers to eager execution, and return the tensors that are page-locked, which fake ones cannot be."""
    tensors: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    without_compilation(monkeypatch)
    monkeypatch.setattr("trainer.capacity.need.layer_bytes", uncompiled_layer_bytes)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    return tensors


def settings_of(**changes: Any) -> TrainerSettings:
    return TrainerSettings.load(
        activation_checkpointing=True, shard_parameters=True, cpu_offload=True, batch_size=256, group_size=16,
        micro_batch_tokens=TOKENS, **changes,
    )  # fmt: skip


def peak(layers: int) -> tuple[int, int]:
    """Return the bytes of the device at the fullest moment of a step, with layers of 32B, and the preflight's."""
    config, settings = with_layers(CONFIGS["32B"][1], layers), settings_of()
    with tracked_pass(config, settings, TOKENS, SEQUENCE, gpus=RANKS) as tracked:
        assert {p.grad.device.type for p in tracked.policy.parameters() if p.grad is not None} == {"cpu"}
        # Before the optimizer's step, whose operator is tried on whole tensors that do not exist.
        found = bytes_of_device(tracked.tracker, "peak")
        tracked.optimizer.step()
    assert {x.device.type for moments in tracked.optimizer.state.values() for x in moments.values()} == {"cpu"}
    return found, preflight(config, settings, RANKS).total("device") - CUDA_CONTEXT


def test_a_gpu_has_no_state_and_takes_the_bytes_that_the_preflight_says() -> None:
    # With fewer layers the fullest moment is another one.
    (few, expected), (more, _) = map(peak, (6, 7))
    assert 0.8 * expected < few < expected, "too much or too little memory is asked for"
    assert more - few == pytest.approx(2 * TOKENS * 5120, rel=0.01), "a layer adds its input, which is kept"


def test_shards_are_copied_to_the_device_without_a_wait(pinned: list[Tensor]) -> None:
    config = with_layers(CONFIGS["0.5B"][1], 2)
    settings = settings_of().model_copy(update={"activation_checkpointing": False})
    batch = packed_sequences(SEQUENCE, SEQUENCE)
    with pretended_ranks(gpus=RANKS) as ranks, FakeTensorMode(allow_non_fake_inputs=True):
        trained = pretended_policy(config, settings, ranks)
        assert len(pinned) == len(list(trained.parameters()))
        batch = batch.to(ranks.device)
        with Seen() as seen:
            trained(batch).logprobs.sum().backward()
    copies = [call for call in seen.calls if is_copy_to_the_device(call)]
    assert len(copies) > 2 * len(list(trained.parameters())) - 10
    assert all(call.options.get("non_blocking") for call in copies)
