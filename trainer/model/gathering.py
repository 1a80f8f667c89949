"""Whole parameters from the ranks' shards: cast to their final type first, gathered in buckets, copied to the host."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from trainer.model.ranks import Ranks
from trainer.model.rounding import Rounding

BUCKET_BYTES = 1 << 28
"""Bytes of one collective: large enough that the start of a collective takes no time compared with its transfer."""
BLOCK_BYTES = 1 << 28
"""Bytes of a block of page-locked memory, a power of two, because torch rounds each allocation up to one."""

_LAYER = re.compile(r".*?\.\d+\.")


def by_layer(named: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the parameters of one decoder layer after the other, and those between layers."""

    def layer(item: tuple[str, Tensor]) -> str:
        prefix = _LAYER.match(item[0])
        return prefix[0] if prefix else ""

    for _, items in groupby(named, layer):
        yield dict(items)


def gather(parameters: Mapping[str, Tensor], rounding: Rounding) -> dict[str, Tensor]:
    """Return whole parameters by name on the first rank of their mesh, and nothing on the others. A collective.

    Each rank casts its shards before they are sent. On a mesh of one rank, parameters of that type are not copied.

    Args:
        parameters: tensors, sharded in their first dimension or whole.
        rounding: makes the type of the result.
    """
    whole: dict[str, Tensor] = {}
    bucket: dict[str, DTensor] = {}
    size = 0
    for name, parameter in parameters.items():
        if not isinstance(parameter, DTensor):
            whole[name] = rounding(plain_name(name), parameter.detach())
        elif _shard_group(parameter).size() == 1:
            whole[name] = rounding(plain_name(name), parameter.to_local().detach())
        else:
            if bucket and size + parameter.numel() * rounding.dtype.itemsize > BUCKET_BYTES:
                whole |= _gather_bucket(bucket, rounding)
                bucket, size = {}, 0
            bucket[name] = parameter
            size += parameter.numel() * rounding.dtype.itemsize
    whole |= _gather_bucket(bucket, rounding)
    return {name: whole[name] for name in parameters if name in whole}


def whole_parameters(module: nn.Module, rounding: Rounding) -> Iterator[tuple[str, Tensor]]:
    """Yield every whole parameter of a sharded module by its name; on rank 0 only. A collective."""
    for layer in by_layer(module.named_parameters()):
        for name, value in gather(layer, rounding).items():
            yield plain_name(name), value


def plain_name(name: str) -> str:
    """Return a parameter's name without the wrappers of activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def _gather_bucket(parameters: Mapping[str, DTensor], rounding: Rounding) -> dict[str, Tensor]:
    """Gather sharded parameters with one collective. Every rank sends each as many rows as the first rank has."""
    if not parameters:
        return {}
    group = _shard_group(next(iter(parameters.values())))
    n_ranks, rank = group.size(), group.rank()
    rows = {name: -(-p.shape[0] // n_ranks) for name, p in parameters.items()}
    shapes = {name: (rows[name], *p.shape[1:]) for name, p in parameters.items()}
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    # CPU_OFFLOAD keeps shards in host memory, where a collective takes many times as long.
    device = torch.device(next(iter(parameters.values())).device_mesh.device_type)
    sent = torch.zeros(sum(sizes), dtype=rounding.dtype, device=device)
    for size, place, (name, parameter) in zip(sizes, sent.split(sizes), parameters.items(), strict=True):
        shard = parameter.to_local().detach().flatten().to(device)
        place[: len(shard)].copy_(rounding(plain_name(name), shard, rank * size))
    received = [torch.empty_like(sent) for _ in range(n_ranks)] if rank == 0 else None
    # As bytes, because not every backend gathers every type of numbers.
    pieces = None if received is None else [piece.view(torch.uint8) for piece in received]
    dist.gather(sent.view(torch.uint8), pieces, group=group, group_dst=0)
    if received is None:
        return {}
    parts = [piece.split(sizes) for piece in received]
    whole = {}
    for number, (name, parameter) in enumerate(parameters.items()):
        left = [min(rows[name], max(parameter.shape[0] - r * rows[name], 0)) for r in range(n_ranks)]
        whole[name] = torch.cat([parts[r][number].view(shapes[name])[:n] for r, n in enumerate(left)])
    return whole


def _shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """Return the process group over which a parameter's rows are spread; on a 2-D mesh, one of several alike."""
    (dimension,) = (i for i, placement in enumerate(parameter.placements) if isinstance(placement, Shard))
    return parameter.device_mesh.get_group(dimension)


def gather_state(parameters: Iterator[tuple[str, Tensor]], ranks: Ranks, *, copy: bool) -> dict[str, Tensor]:
    """Return whole parameters on rank 0's CPU, each with a storage of its own; nothing on other ranks. A collective.

    Args:
        parameters: the parameters by name, from one of the policy's collectives.
        ranks: all ranks.
        copy: share no memory with the policy, so that the tensors outlive its next update; those of a GPU never do.
    """
    state: dict[str, Tensor] = {}
    host = PinnedMemory()
    for name, value in parameters:
        if not ranks.is_main:
            continue
        if value.is_cuda:
            state[name] = host.copy_of(value)
        else:
            # safetensors refuses a view of a part of a storage, such as one expert of a tensor of all experts.
            is_part = value.untyped_storage().nbytes() != value.nbytes
            state[name] = value.to("cpu", copy=copy or is_part)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    return state


class PinnedMemory:
    """Page-locked host memory in blocks, out of which tensors are cut. A GPU copies into it while it computes."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy_of(self, value: Tensor) -> Tensor:
        """Start to copy a CUDA tensor; the copy is complete once the current stream is synchronised."""
        if self._used + value.nbytes > len(self._block):
            self._block = torch.empty(max(BLOCK_BYTES, value.nbytes), dtype=torch.uint8, pin_memory=True)
            self._used = 0
        # A storage of its own over the block's memory, because safetensors refuses to write parts of a storage.
        copied = torch.frombuffer(self._block.numpy(), dtype=value.dtype, count=value.numel(), offset=self._used).view(
            value.shape
        )
        copied.copy_(value, non_blocking=True)
        self._used += -(-value.nbytes // 64) * 64
        return copied
