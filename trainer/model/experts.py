"""The experts of a mixture, registered with transformers under the name ``gathered``: gathers, and products by group.

transformers' own function indexes the states by the experts' order. The gradient of an index adds up rows, and a token
is a row of each of its experts; on CUDA, rows of one token are added one after another. Here the order is known to be a
permutation of (token, expert) pairs, so that the gradient of each gather is a gather by the inverse permutation.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

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
