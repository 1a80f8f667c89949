"""The reduce-scatter by pairs gives what gloo's own would."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.trainer.processes import run_on_ranks
from trainer.model.ranks import Ranks, join_ranks
from trainer.model.sharding import PairwiseReduceScatter

PART = 5


def given(rank: int, world_size: int) -> torch.Tensor:
    return torch.randn(world_size * PART, generator=torch.Generator().manual_seed(rank))


def reduce(ranks: Ranks) -> dict[str, list[float]]:
    scatter, parts = PairwiseReduceScatter(), {}
    for operation in ("SUM", "AVG"):
        output = scatter.allocate((PART,), dtype=torch.float32, device=ranks.device)
        scatter(output, given(ranks.rank, ranks.world_size), ranks.mesh.get_group(), getattr(dist.ReduceOp, operation))
        parts[operation] = output.tolist()
    return parts


@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_gets_its_part_of_all(n_ranks: int) -> None:
    parts = run_on_ranks(n_ranks, reduce)
    total = sum(given(rank, n_ranks) for rank in range(n_ranks))
    for operation, expected in (("SUM", total), ("AVG", total / n_ranks)):
        assert torch.tensor([part[operation] for part in parts]).flatten().tolist() == expected.tolist()


@pytest.mark.parametrize(("operation", "async_op"), [(dist.ReduceOp.MAX, False), (dist.ReduceOp.SUM, True)])
def test_what_it_does_not_do_is_refused(operation: dist.ReduceOp, async_op: bool) -> None:
    with join_ranks() as ranks:
        values = torch.ones(PART)
        with pytest.raises(ValueError, match="only SUM and AVG"):
            PairwiseReduceScatter()(values, values, ranks.mesh.get_group(), operation, async_op)
