"""Mixtures of experts: each token is computed by the few experts that a router chooses for it.

The router's logits are in the compute type and their softmax in float32, as in transformers and SGLang. A token's sum
runs over its experts in ascending order, so that its result does not depend on the other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.core.linear import Linear


@dataclass(frozen=True)
class Mixture:
    """The weights of one layer's router and experts."""

    router: Linear
    experts: Sequence[tuple[Linear, Linear]]
    """The product of gate and up projection, and the down projection, of each expert."""
    per_token: int
    normalises: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, H] for x [N, H]."""
        weights, chosen = torch.softmax(self.router(x).float(), -1).topk(self.per_token)
        if self.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        result = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, places = torch.where(chosen == expert)
            gate_up, down = self.experts[expert]
            gate, up = gate_up(x[rows]).chunk(2, -1)
            result[rows] += down(functional.silu(gate) * up) * weights[rows, places, None]
        return result
