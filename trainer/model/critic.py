"""The critic: a value head on a model of its own, or on the policy's, that estimates each token's value."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.algorithm.packing import MicroBatch
from trainer.config import TrainerSettings
from trainer.model.policy import choose_compute, load_model, predicting_states, shard
from trainer.model.ranks import Ranks


class Critic(nn.Module):
    """A decoder with a value head, float32 master weights, sharded by FSDP2 over all ranks.

    A forward pass is a collective: every rank must call the critic equally often.
    """

    def __init__(self, decoder: PreTrainedModel, value_head: nn.Linear) -> None:
        super().__init__()
        self.decoder = decoder
        self.value_head = value_head

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return the values [N], float32, of the states before a micro-batch's N trained tokens."""
        return cast("Tensor", self.value_head(predicting_states(self.decoder, batch))).sum(1)


def make_value_head(decoder: PreTrainedModel, ranks: Ranks) -> nn.Linear:
    """Return a value head for a decoder's states, all zeros, so that training starts with the value 0 everywhere."""
    with torch.device("cpu" if ranks.is_main else "meta"):
        head = nn.Linear(decoder.config.hidden_size, 1, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def load_critic(settings: TrainerSettings, ranks: Ranks) -> Critic:
    """Load MODEL_NAME's decoder with a new value head, and shard it. A collective.

    Raises:
        ConfigurationError: the model cannot be loaded, or its architecture is not supported.
    """
    decoder = cast("PreTrainedModel", load_model(settings, materialise=ranks.is_main).base_model)
    critic = Critic(decoder, make_value_head(decoder, ranks))
    critic.eval().requires_grad_()
    chosen = choose_compute(settings, ranks)
    shard(critic, decoder, settings, ranks, chosen, has_checkpointing=settings.activation_checkpointing)
    return critic
