"""A learner on the pretended device, whose layers are traced and not compiled to kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from services.core.machine import Compute, ComputeType
from tests.sequences import trained_sequence
from tests.trainer.rank_jobs import make_learner
from tests.trainer.tiny import save_model
from trainer.algorithm.attention_layout import TreeMask
from trainer.algorithm.packing import ALONE, Context, MicroBatch, TrainingGroup, pack
from trainer.capacity.need import Need, needed
from trainer.capacity.shape import ModelShape
from trainer.capacity.work import Limits, Machine, work_of
from trainer.config import TrainerSettings
from trainer.model import attention, loading, logprobs, policy, sharding
from trainer.model.attention import TREE_ATTENTION
from trainer.model.learner import Learner
from trainer.model.optimizer import make_optimizer
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks


class _ValueHead(policy.ValueHead):
    """A value head whose data begins on the device: FakeTensorMode does not move the data of parameters."""

    def __init__(self, decoder: PreTrainedModel, ranks: Ranks) -> None:
        nn.Linear.__init__(self, decoder.config.hidden_size, 1, device=ranks.device, dtype=torch.float32)


class _FirstRank(Ranks):
    """Rank 0 among ranks that are not there: of their numbers it knows its own only."""

    def broadcast_json(self, value: Any = None) -> Any:
        return value

    def _reduce(self, values: dict[str, float], operation: Any, missing: float) -> dict[str, float]:
        return values


@contextmanager
def pretended_ranks(nodes: int = 1, gpus: int = 1, context: int = 1) -> Iterator[Ranks]:
    """Join a process group whose collectives move nothing, as rank 0 on cuda:0. Several nodes have a 2-D mesh."""
    world_size = nodes * gpus
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        flat = init_device_mesh("cuda", (world_size,))
        yield _FirstRank(0, world_size, torch.device("cuda", 0), flat).replicated(nodes).in_contexts(context)
    finally:
        dist.destroy_process_group()


def without_compilation(patch: pytest.MonkeyPatch) -> None:
    """Leave layers to eager execution, and let other operations stand for kernels: they read, write and keep the same.

    SDPA stands for flex_attention, and operations in place for the compiled arithmetic of the output head.
    """

    def causal(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, **_: Any) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)

    def measure(logits: Tensor) -> tuple[Tensor, Tensor]:
        numbers = logits.amax(1)
        return numbers, numbers

    def differentiate(log_p: Tensor, *_: Any) -> Tensor:
        return log_p.neg_()

    in_place = {logprobs._measure: measure, logprobs._differentiate: differentiate}
    patch.setattr(attention, "flex_attention", causal)
    patch.setattr(logprobs, "_fused", lambda function, device: in_place[function])
    patch.setattr(sharding, "compile_layers", lambda *_: None)


def pretended_policy(config: PretrainedConfig, settings: TrainerSettings, ranks: Ranks) -> Policy:
    """Return a policy of any size on cuda:0, sharded over the mesh. Within FakeTensorMode."""
    file_type = config.dtype  # transformers sets it to the type of the model that it makes
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=TREE_ATTENTION)
    decoder = model.base_model
    if settings.lora_rank:
        model = _adapted_on_the_device(model, settings)
    trained, chosen = policy.Policy(model, 1.0).eval(), Compute("cuda", ComputeType.BFLOAT16, 1, "")
    policy.freeze(trained, chosen, file_type, trainable=True)
    alone = replace(ranks, world_size=1)  # there is nobody to send the weights to
    sharding.shard(trained, decoder, settings, alone, chosen)
    return trained


def _adapted_on_the_device(model: PreTrainedModel, settings: TrainerSettings) -> PreTrainedModel:
    """Return the model with adapters, which begin on the device: FakeTensorMode cannot move them there as PEFT does."""
    with torch.device("cuda"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "to", lambda module, *_, **__: module)
        return loading.with_adapters(model, settings)


def packed_sequences(tokens: int, sequence: int, context: Context = ALONE) -> MicroBatch:
    """Return a rank's part of a micro-batch of sequences of equal length, on the CPU."""
    half = [trained_sequence([7] * (sequence - 1), [-1.0] * (sequence - 1), [0.1] * (sequence - 1))]
    return pack([TrainingGroup([5, 5], half) for _ in range(tokens // sequence)], TreeMask, context)


@dataclass(frozen=True)
class TrackedPass:
    """A first forward and backward pass, whose allocations are counted."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    batch: MicroBatch
    tracker: Any


def bytes_of_device(tracker: Any, moment: str) -> int:
    """Return the bytes of the device at the fullest moment so far (``peak``), or now (``current``)."""
    snapshot = tracker.get_tracker_snapshot(moment)
    total: int = next(found["Total"] for device, found in snapshot.items() if device.type == "cuda")
    return total


@contextmanager
def tracked_pass(
    config: PretrainedConfig, settings: TrainerSettings, tokens: int, sequence: int, *, gpus: int = 1
) -> Iterator[TrackedPass]:
    """Make a pass over ``tokens`` tokens, in sequences of equal length; count what the block allocates, too."""
    batch = packed_sequences(tokens, sequence)
    with pretended_ranks(gpus=gpus) as ranks, FakeTensorMode(allow_non_fake_inputs=True):
        trained = pretended_policy(config, settings, ranks)
        optimizer, tracker = make_optimizer(settings, trained), cast("Any", MemTracker())
        batch = batch.to(ranks.device)
        tracker.track_external(trained, optimizer)
        with tracker:
            trained(batch).logprobs.sum().backward()
            yield TrackedPass(trained, optimizer, batch, tracker)


def preflight(config: PretrainedConfig, settings: TrainerSettings, gpus: int = 1) -> Need:
    """Return what the preflight says that a rank of one node of this card needs."""
    shape, memory = ModelShape.of(config), torch.cuda.get_device_properties(0).total_memory
    return needed(shape, work_of(settings, shape, Machine(1, gpus, 2, Limits(memory, 0, 0, 0))))


@contextmanager
def pretended_learner(
    directory: Path, config: PretrainedConfig, *, nodes: int = 1, gpus: int = 1, context: int = 1, **settings: Any
) -> Iterator[Learner]:
    """Make a learner of a model on cuda:0, within FakeTensorMode. Layers must be traced whole, or their call raises.

    Args:
        directory: an empty directory for the model's configuration and tokenizer.
        config: the model.
        nodes: replicas of the sharded state.
        gpus: ranks over which the state is spread.
        context: ranks of a context group.
        settings: settings of the trainer.
    """
    save_model(directory, config)

    def on_the_device(_: TrainerSettings, materialise: bool) -> PreTrainedModel:
        assert materialise
        with torch.device("cuda"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=TREE_ATTENTION
            )
        return model

    with pytest.MonkeyPatch.context() as patch, pretended_ranks(nodes, gpus, context) as ranks:
        # Values that do not exist cannot be digested, nor can kernels be made of what is never run.
        patch.setattr(policy, "load_model", on_the_device)
        patch.setattr(policy, "ValueHead", _ValueHead)
        patch.setattr(policy, "with_adapters", _adapted_on_the_device)
        patch.setattr(sharding, "_receive", lambda *_, **__: None)
        patch.setattr(policy, "weights_digest", lambda model: "")
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        patch.setattr(logprobs, "_fused", lambda function, device: function)
        # Packing happens in a thread outside of this mode, so its tensors are not fake.
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield make_learner(ranks, directory, compute_type="bfloat16", micro_batch_tokens=200, **settings)
