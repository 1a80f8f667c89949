"""FSDP2 on a model: its layers sharded over the ranks, compiled on CUDA, and recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from services.core.errors import ConfigurationError
from services.core.machine import Compute
from trainer.config import TrainerSettings
from trainer.model.experts import GATHERED_EXPERTS
from trainer.model.ranks import Ranks
from trainer.model.reduce_scatter import PairwiseReduceScatter
from trainer.model.supported import FAMILIES
from trainer.model.value_head import ValueHead


def shard(
    module: nn.Module,
    decoder: PreTrainedModel,
    settings: TrainerSettings,
    ranks: Ranks,
    chosen: Compute,
    *,
    has_checkpointing: bool,
) -> None:
    """Shard a module over the ranks, which receive their parts from rank 0.

    Args:
        module: the module, with data on rank 0 only.
        decoder: the part of it with the list of layers; each layer is sharded by itself.
        settings: SHARD_PARAMETERS.
        ranks: all ranks.
        chosen: the type of numbers to compute with. A value head computes in float32.
        has_checkpointing: recompute layers in the backward pass.

    Raises:
        ConfigurationError: the decoder has no list of layers.
    """
    layers = _decoder_layers(decoder)
    if ranks.device.type == "cuda":
        decoder.set_experts_implementation(GATHERED_EXPERTS)
        compile_layers(layers)
    if has_checkpointing:
        apply_activation_checkpointing(module, check_fn=lambda part: part in layers)
        layers = _decoder_layers(decoder)
    # Rank 0's weights stay on the host. fully_shard moves one layer at a time to the device; loading moves one tensor.
    state = module.state_dict() if ranks.is_main and ranks.world_size > 1 else {}
    _fully_shard(module, layers, settings, ranks, chosen)
    if ranks.world_size > 1:
        _receive(module, state, ranks)


def _decoder_layers(decoder: PreTrainedModel) -> list[nn.Module]:
    layers = getattr(decoder, "layers", None)
    if layers is None:
        raise ConfigurationError(
            f"MODEL_NAME: {decoder.config.model_type} has no list of decoder layers named `layers`; "
            f"choose a model of another family ({FAMILIES})"
        )
    return list(layers)


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile the forward pass of decoder layers for CUDA at their first call, with attention as one kernel.

    All layers share one graph, in which the lengths of micro-batches are variables. The hooks of FSDP, which run before
    and after ``forward``, stay outside of it.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _fully_shard(
    module: nn.Module, layers: Sequence[nn.Module], settings: TrainerSettings, ranks: Ranks, chosen: Compute
) -> None:
    """Apply FSDP2 to each layer, to value heads and to the rest of a module."""
    # Parameters have the compute type, and so have the states computed from them; the masks of attention stay float32.
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, chosen.compute_type), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    frees = settings.shard_parameters is not False
    for layer in layers:
        fully_shard(layer, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=frees)
    heads = [part for part in module.modules() if isinstance(part, ValueHead)]
    for head in heads:
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        fully_shard(head, mesh=ranks.mesh, mp_policy=exact, reshard_after_forward=False)
    fully_shard(module, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=False)
    if ranks.device.type == "cpu":
        for part in (*layers, *heads, module):
            cast("FSDPModule", part).set_custom_reduce_scatter(PairwiseReduceScatter())
            # gloo has no mean.
            cast("FSDPModule", part).set_force_sum_reduction_for_comms(ranks.mesh.ndim > 1)


def _receive(module: nn.Module, state: dict[str, Any], ranks: Ranks) -> None:
    """Receive a rank's shards of ``state``, which is empty on all ranks but rank 0, and the buffers."""
    if not ranks.is_main:
        module.to_empty(device=ranks.device)
    set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # A state dict does not contain rotary frequencies, which are buffers.
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)
    cast("FSDPModule", module).set_requires_gradient_sync(True)


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, so that only the shards remain."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def leave_gpu(modules: Iterable[nn.Module]) -> None:
    """Free what the next step does not need of a GPU, for another process on it: gathered parameters, cached blocks."""
    for module in modules:
        reshard(module)
    torch.cuda.empty_cache()
