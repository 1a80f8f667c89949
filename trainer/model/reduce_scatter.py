"""A reduce-scatter for FSDP over gloo that moves half the data of gloo's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The argument of FSDP's public set_custom_reduce_scatter; the class itself is not exported.
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


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
        ranks, own = group.size(), group.rank()
        parts = list(input_tensor.chunk(ranks))
        others = [rank for rank in range(ranks) if rank != own]
        received = {rank: torch.empty_like(output_tensor) for rank in others}
        transfers = [dist.irecv(received[rank], group=group, group_src=rank) for rank in others]
        transfers += [dist.isend(parts[rank], group=group, group_dst=rank) for rank in others]
        for transfer in transfers:
            assert transfer is not None, "this process is in the group"
            transfer.wait()
        received[own] = parts[own]
        output_tensor.copy_(received[0])
        for rank in range(1, ranks):
            output_tensor.add_(received[rank])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(ranks)
