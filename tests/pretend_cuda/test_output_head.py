"""The output head on the pretended device: few chunks, because each rewrites the gradient of the output embedding."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.pretend_cuda.seen import Seen
from trainer.model.logprobs import chunk_states, token_logprobs

pytestmark = pytest.mark.cuda

QWEN, DIMENSIONS = 151_936, 896


def test_the_gradient_of_the_output_embedding_is_rewritten_a_few_times_a_micro_batch() -> None:
    states = 16_384
    with FakeTensorMode(), Seen() as seen:
        hidden = torch.empty(states, DIMENSIONS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(QWEN, DIMENSIONS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(states, dtype=torch.int64, device="cuda")
        logprobs, _ = token_logprobs(hidden, weight, targets, torch.arange(states, device="cuda"))
        logprobs.sum().backward()
    additions = [c for c in seen.calls if c.name == "aten.add_.Tensor" and c.result.shape == weight.shape]
    assert 1 <= len(additions) <= 8
    largest = max(call.result.nbytes for call in seen.calls if isinstance(call.result, torch.Tensor))
    assert largest <= torch.cuda.get_device_properties(0).total_memory / 32


def test_a_chunk_has_2048_states_however_large_the_vocabulary() -> None:
    assert chunk_states(10**9, torch.device("cuda", 0)) == 2048
    assert chunk_states(QWEN, torch.device("cuda", 0)) > 4096
