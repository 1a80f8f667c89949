"""The critic's head: from a decoder's hidden states to values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.model.ranks import Ranks


class ValueHead(nn.Linear):
    """A linear map from hidden states to values, all zeros, so that training starts with the value 0 everywhere."""

    def __init__(self, decoder: PreTrainedModel, ranks: Ranks) -> None:
        """Make a head for a decoder's states, with data on rank 0 only."""
        device = "cpu" if ranks.is_main else "meta"
        super().__init__(decoder.config.hidden_size, 1, device=device, dtype=torch.float32)

    def reset_parameters(self) -> None:
        """Set weight and bias to zero."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return the values [N] of the states [N, D]."""
        return super().forward(states).sum(1)
