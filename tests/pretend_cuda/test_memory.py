"""The preflight's bytes of a GPU are those that a step allocates, counted on the pretended device at the size of 8B."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.scaling.models import CONFIGS
from services.core.compute import Compute, ComputeType
from trainer.algorithm.packing import TrainingGroup, TrainingSequence, pack
from trainer.algorithm.tree_mask import TreeMask
from trainer.config import TrainerSettings
from trainer.model import attention, policy
from trainer.model.attention import TREE_ATTENTION
from trainer.model.optimizer import make_optimizer
from trainer.model.policy import Policy, shard
from trainer.model.ranks import Ranks
from trainer.preflight.shape import ModelShape
from trainer.preflight.sizes import CUDA_CONTEXT, needed
from trainer.preflight.work import work_of

pytestmark = pytest.mark.cuda

RANKS = 8
LAYERS = 4
SEQUENCE = 2048
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Step:
    peak: int
    """Bytes of the device at the fullest moment."""
    expected: int


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cuda", (RANKS,))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _without_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what autograd keeps without a compiler, and let SDPA stand for flex_attention, which keeps the same."""

    def causal(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, **_: Any) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)

    monkeypatch.setattr(attention, "flex_attention", causal)
    monkeypatch.setattr(policy, "compile_layers", lambda layers: None)


def step(config: PretrainedConfig, tokens: int, mesh: DeviceMesh, *, has_checkpointing: bool) -> Step:
    settings = TrainerSettings.load(
        activation_checkpointing=has_checkpointing, shard_parameters=True, batch_size=256, group_size=16,
        micro_batch_tokens=tokens,
    )  # fmt: skip
    half = [TrainingSequence([7] * (SEQUENCE - 1), [0.1] * (SEQUENCE - 1), [-1.0] * (SEQUENCE - 1))]
    batch = pack([TrainingGroup([5, 5], half) for _ in range(tokens // SEQUENCE)], TreeMask)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with DEVICE:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=TREE_ATTENTION)
        trained = Policy(model, 1.0).eval().requires_grad_()
        chosen = Compute("cuda", ComputeType.BFLOAT16, 1, "")
        shard(
            trained, model.base_model, settings, Ranks(0, 1, DEVICE, mesh), chosen, has_checkpointing=has_checkpointing
        )
        optimizer = make_optimizer(settings, trained)
        batch = batch.to(DEVICE)
        tracker: Any = MemTracker()
        tracker.track_external(trained, optimizer)
        with tracker:
            trained(batch).logprobs.sum().backward()
        snapshot = tracker.get_tracker_snapshot("peak")
        peak = next(found["Total"] for device, found in snapshot.items() if device.type == "cuda")
    shape = ModelShape.of(config)
    memory = torch.cuda.get_device_properties(0).total_memory
    work = work_of(settings, shape, memory=memory, nodes=1, ranks_per_node=RANKS, compute_bytes=2)
    need = needed(shape, work)
    # The tracked pass is the first one: it begins without gradients and moments.
    own = need.device["gradients"] + need.device["moments"] + CUDA_CONTEXT
    return Step(peak, need.total("device") - own)


@pytest.mark.parametrize("has_checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("label", ["0.5B", "8B"])
def test_a_step_takes_the_bytes_that_the_preflight_says(label: str, has_checkpointing: bool, mesh: DeviceMesh) -> None:
    config = CONFIGS[label][1]
    config = type(config)(**{**config.to_dict(), "num_hidden_layers": LAYERS, "layer_types": None})
    found = step(config, 16384, mesh, has_checkpointing=has_checkpointing)
    assert found.peak == pytest.approx(found.expected, rel=0.15)
    assert found.peak < found.expected * 1.02, "too little memory is asked for"
