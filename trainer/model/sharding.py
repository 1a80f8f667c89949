"""FSDP2 on a model: its layers sharded over the ranks, compiled on CUDA, and recomputed in the backward pass.

Two parts of other libraries are replaced for speed. ``PairwiseReduceScatter`` stands in for gloo's reduce-scatter.
``gathered_experts`` stands in for transformers' function of a mixture's experts, which indexes the states by the
experts' order: the gradient of an index adds up rows, and on CUDA the rows of one token are added one after another.
Here the order is known to be a permutation of (token, expert) pairs, so that the gradient of each gather is a gather by
the inverse permutation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch._dynamo.config as dynamo
import torch._functorch.config as partitioner
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

# The argument of FSDP's public set_custom_reduce_scatter; the class itself is not exported.
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn.functional import grouped_mm
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from services.core.errors import ConfigurationError
from services.core.machine import Compute
from trainer.config import TrainerSettings
from trainer.config.sections import SELECTIVE_BUDGET
from trainer.model.attention import GRAPHS, choose_kernel
from trainer.model.loading import ValueHead, decoder_layers
from trainer.model.ranks import Ranks
from trainer.model.recurrent import mixes_by_states


class PairwiseReduceScatter(ReduceScatter):
    """A reduce-scatter in which every rank sends each other rank only the part that the other rank keeps.

    gloo's own reduces the whole tensor on every rank, which then keeps its part: twice the traffic, and a copy more.
    Parts are added in the order of the ranks, so that the same gradients always give the same sum.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for FSDP to fill."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce this rank's part of every rank's ``input_tensor`` [ranks * n] into ``output_tensor`` [n].

        Raises:
            ValueError: ``op`` is neither SUM nor AVG, or ``async_op`` is true.
        """
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"reduce-scatter with {op} and async_op={async_op}: only SUM and AVG with async_op=False are supported"
            )
        ranks, this = group.size(), group.rank()
        parts = list(input_tensor.chunk(ranks))
        others = [rank for rank in range(ranks) if rank != this]
        received = {rank: torch.empty_like(output_tensor) for rank in others}
        transfers = [dist.irecv(received[rank], group=group, group_src=rank) for rank in others]
        transfers += [dist.isend(parts[rank], group=group, group_dst=rank) for rank in others]
        for transfer in transfers:
            assert transfer is not None, "this process is in the group"
            transfer.wait()
        received[this] = parts[this]
        output_tensor.copy_(received[0])
        for rank in range(1, ranks):
            output_tensor.add_(received[rank])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(ranks)


GATHERED_EXPERTS = "gathered"


def gathered_experts(module: nn.Module, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums of the outputs of each token's experts, [T, D].

    Args:
        module: the experts, with ``gate_up_proj`` [E, 2 I, D] and ``down_proj`` [E, D, I]. Experts of another form are
            computed by transformers' own function.
        states: [T, D].
        chosen: [T, K] int64 in [0, E), the experts of each token.
        weights: [T, K], their weights.
    """
    experts = cast("Any", module)
    if experts.has_bias or experts.is_transposed or not experts.has_gate:
        return cast("Tensor", grouped_mm_experts_forward(module, states, chosen, weights))
    numbers, order = chosen.flatten().sort()
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = torch.searchsorted(numbers, torch.arange(experts.num_experts, device=numbers.device), right=True).int()
    rows = _to_experts(states, order, places, chosen.shape[1])
    inner = experts._apply_gate(grouped_mm(rows, experts.gate_up_proj.transpose(1, 2), offs=ends))
    outputs = _to_tokens(grouped_mm(inner, experts.down_proj.transpose(1, 2), offs=ends), order, places)
    return (outputs.view(*chosen.shape, -1) * weights[..., None]).sum(1).to(states.dtype)


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, order: Tensor, places: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.per_token = per_token
        return states[order // per_token]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        rows = gradients[0][places]
        return rows.view(-1, ctx.per_token, rows.shape[1]).sum(1), None, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[places]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return gradients[0][order], None, None


def _to_experts(states: Tensor, order: Tensor, places: Tensor, per_token: int) -> Tensor:
    """Return the states [T, D] as rows [T K, D] in the experts' order; ``places`` is the inverse of ``order``."""
    return cast("Tensor", _ToExperts.apply(states, order, places, per_token))  # type: ignore[no-untyped-call]  # torch's


def _to_tokens(rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Return the experts' rows [T K, D] in the order of the tokens."""
    return cast("Tensor", _ToTokens.apply(rows, order, places))  # type: ignore[no-untyped-call]  # torch's


ExpertsInterface.register(GATHERED_EXPERTS, gathered_experts)


def shard(
    module: nn.Module, decoder: PreTrainedModel, settings: TrainerSettings, ranks: Ranks, chosen: Compute
) -> None:
    """Shard a module over the ranks, which receive their parts from rank 0.

    Args:
        module: the module, with data on rank 0 only.
        decoder: the part of it with the list of layers; each layer is sharded by itself.
        settings: SHARD_PARAMETERS, CPU_OFFLOAD, and ACTIVATION_CHECKPOINTING of a module that is trained.
        ranks: all ranks.
        chosen: the type of numbers to compute with. A value head computes in float32.

    Raises:
        ConfigurationError: the decoder has no list of layers, or no kernel on a GPU computes it.
    """
    layers = decoder_layers(decoder)
    if ranks.device.type == "cuda" and not ranks.has_rows:
        _check_kernels(decoder.config, chosen, settings)
        decoder.set_experts_implementation(GATHERED_EXPERTS)
        # The kernels of recurrent layers are not the compiler's.
        compile_layers([layer for layer in layers if not mixes_by_states(layer)], settings)
    if settings.activation_checkpointing is True and any(p.requires_grad for p in module.parameters()):
        apply_activation_checkpointing(module, check_fn=lambda part: part in layers)
        wrapped = dict.fromkeys(layers)
        layers = [part for part in module.modules() if getattr(part, "_checkpoint_wrapped_module", None) in wrapped]
    # Rank 0's weights stay on the host. fully_shard moves one layer at a time to the device; loading moves one tensor.
    state = module.state_dict() if ranks.is_main and ranks.world_size > 1 else {}
    _fully_shard(module, layers, settings, ranks, chosen)
    if ranks.world_size > 1:
        _receive(module, state, ranks, has_offload=settings.cpu_offload is True)


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names in configurations for the number of a layer's experts."""
NARROWEST_HEAD = 16
"""The smallest size of a head that the kernel of attention has on GPUs."""


def _check_kernels(config: PretrainedConfig, chosen: Compute, settings: TrainerSettings) -> None:
    """Refuse a model whose layers could not be compiled for a GPU."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width < NARROWEST_HEAD:
        raise ConfigurationError(
            f"MODEL_NAME: {config.model_type} has attention heads of {width} numbers, and on a GPU at least "
            f"{NARROWEST_HEAD} are needed; choose another model, or set CUDA_VISIBLE_DEVICES= to train on the processor"
        )
    if chosen.compute_type == "float32" and any(getattr(config, name, None) for name in EXPERTS):
        raise ConfigurationError(
            "COMPUTE_TYPE=float32: on a GPU a mixture of experts computes in bfloat16 only; set COMPUTE_TYPE and "
            "PUBLISH_TYPE to bfloat16"
        )
    if chosen.compute_type == "float32" and settings.attention_kernel == "flash":
        raise ConfigurationError(
            "ATTENTION_KERNEL=flash computes in bfloat16 only; set COMPUTE_TYPE=bfloat16 or ATTENTION_KERNEL=triton"
        )


def compile_layers(layers: Sequence[nn.Module], settings: TrainerSettings) -> None:
    """Compile the forward pass of decoder layers for CUDA at their first call, with attention as one kernel.

    Layers share their graphs, in which the lengths of micro-batches are variables: one each with and without gradients,
    adapters and a frozen input. The hooks of FSDP, which run before and after ``forward``, stay outside of them.
    A layer that cannot be compiled raises an error: uncompiled attention would write down a matrix of T x T numbers.
    The compiler reads its budget at the first call, when all models have been loaded with the same settings.
    """
    is_selective = settings.activation_checkpointing == "selective"
    partitioner.activation_memory_budget = SELECTIVE_BUDGET if is_selective else 1.0
    choose_kernel(settings.attention_kernel)
    # By default an FSDP module's integers, such as the width of a head, become variables of the graph, for which torch
    # cannot make the attention's kernel; floats, such as the scale of adapters, become tensors on the host.
    dynamo.skip_fsdp_guards = False
    dynamo.specialize_float = True
    for layer in layers:
        layer.forward = torch.compile(  # type: ignore[call-overload]  # the overloads lack the limit
            layer.forward, dynamic=True, fullgraph=True, recompile_limit=GRAPHS
        )


def _fully_shard(
    module: nn.Module, layers: Sequence[nn.Module], settings: TrainerSettings, ranks: Ranks, chosen: Compute
) -> None:
    """Apply FSDP2 to each layer, to value heads and to the rest of a module."""
    # Parameters have the compute type, and so have the states computed from them; the masks of attention stay float32.
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, chosen.compute_type), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    frees, offload = settings.shard_parameters is not False, OffloadPolicy()
    if settings.cpu_offload is True:
        offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    apply = partial(fully_shard, mesh=ranks.mesh, offload_policy=offload)
    for layer in layers:
        apply(layer, mp_policy=precision, reshard_after_forward=frees)
    heads = [part for part in module.modules() if isinstance(part, ValueHead)]
    for head in heads:
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        apply(head, mp_policy=exact, reshard_after_forward=False)
    apply(module, mp_policy=precision, reshard_after_forward=False)
    if ranks.device.type == "cpu":
        for part in (*layers, *heads, module):
            cast("FSDPModule", part).set_custom_reduce_scatter(PairwiseReduceScatter())
            # gloo has no mean.
            cast("FSDPModule", part).set_force_sum_reduction_for_comms(ranks.mesh.ndim > 1)


def _receive(module: nn.Module, state: dict[str, Any], ranks: Ranks, *, has_offload: bool) -> None:
    """Receive a rank's shards of ``state``, which is empty on all ranks but rank 0, and the buffers."""
    if not ranks.is_main:
        module.to_empty(device="cpu" if has_offload else ranks.device)
        for part in module.modules():  # buffers are on the device in any case
            part._buffers.update({name: x.to(ranks.device) for name, x in part._buffers.items() if x is not None})
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
    """Free GPU memory that the next step does not need, for other processes: gathered parameters and cached blocks."""
    for module in modules:
        reshard(module)
    torch.cuda.empty_cache()
