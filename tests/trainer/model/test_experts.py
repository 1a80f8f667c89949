"""The gathered experts of a mixture compute what transformers computes expert by expert, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.trainer.tiny import FAMILIES
from trainer.model.sharding import GATHERED_EXPERTS

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
