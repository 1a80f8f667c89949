"""The reduce-scatter by pairs gives what gloo's own would; gathered experts compute as one after another do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.trainer.processes import run_on_ranks
from tests.trainer.tiny import FAMILIES
from trainer.model.ranks import Ranks, join_ranks
from trainer.model.sharding import GATHERED_EXPERTS, PairwiseReduceScatter

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


# --- a mixture's experts ----------------------------------------------------------------------------------------------

TOKENS, PER_TOKEN = 37, 2


def outcome(implementation: str) -> list[Tensor]:
    """Return the output and all gradients of the same random experts with an implementation."""
    config = type(FAMILIES["qwen3_moe"])(**FAMILIES["qwen3_moe"].to_dict())
    config._experts_implementation = implementation
    torch.manual_seed(0)
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    states = torch.randn(TOKENS, config.hidden_size, requires_grad=True)
    weights, chosen = torch.randn(TOKENS, config.num_experts).softmax(1).topk(PER_TOKEN)
    chosen[:] = torch.where(chosen == 2, 3, chosen)  # one expert gets no token, and some tokens get one twice
    weights.requires_grad_()
    output = experts(states, chosen, weights)
    (output * torch.randn(output.shape)).sum().backward()
    found = [output, states.grad, weights.grad, *(parameter.grad for parameter in experts.parameters())]
    return [tensor for tensor in found if tensor is not None]


def test_output_and_gradients_are_those_of_one_expert_after_another() -> None:
    expected, found = outcome("eager"), outcome(GATHERED_EXPERTS)
    assert len(found) == len(expected) == 5
    for one, other in zip(found, expected, strict=True):
        assert one.detach().numpy() == pytest.approx(other.detach().numpy(), abs=1e-5)
