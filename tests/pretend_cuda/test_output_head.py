"""The output head on the pretended device: few chunks, because each rewrites the gradient of the output embedding."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.pretend_cuda.compiled import moved_by
from tests.pretend_cuda.seen import Seen
from trainer.model import logprobs
from trainer.model.logprobs import LONGEST_STRETCH, _differentiate, _measure, token_logprobs

pytestmark = pytest.mark.cuda

QWEN, DIMENSIONS = 151_936, 896


def test_the_gradient_of_the_output_embedding_is_rewritten_a_few_times_a_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = 16_384
    monkeypatch.setattr(logprobs, "_fused", lambda function, device: function)
    with FakeTensorMode(), Seen() as seen:
        hidden = torch.empty(states, DIMENSIONS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(QWEN, DIMENSIONS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(states, dtype=torch.int64, device="cuda")
        token_logprobs(hidden, weight, targets, torch.arange(states, device="cuda"))[0].sum().backward()
    additions = [c for c in seen.calls if c.name == "aten.add_.Tensor" and c.result.shape == weight.shape]
    assert 1 <= len(additions) <= 8
    largest = max(call.result.nbytes for call in seen.calls if isinstance(call.result, torch.Tensor))
    assert largest <= torch.cuda.get_device_properties(0).total_memory / 32


@pytest.mark.parametrize("vocabulary", [QWEN, 152_064, 128_256, 32_000])
def test_the_arithmetic_over_the_logits_reads_them_once_forward_and_rewrites_them_once_backward(
    vocabulary: int,
) -> None:
    rows = 4096
    with FakeTensorMode(), torch.device("cuda"):
        logits, numbers = torch.empty(rows, vocabulary), torch.empty(rows, 1)
        forward = moved_by(_measure, logits)
        backward = moved_by(_differentiate, logits, numbers, numbers, (numbers, numbers), None)
    # No array of probabilities is ever written down; a stretch of logits leaves three numbers, written and read again.
    assert sum(forward) / logits.nbytes == pytest.approx(1, abs=0.06)
    assert [moved / logits.nbytes for moved in backward] == pytest.approx([2], abs=0.01)


def test_a_process_may_train_models_of_many_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    logprobs._fused.cache_clear()
    measure = logprobs._fused(_measure, torch.device("cuda"))
    for vocabulary in range(LONGEST_STRETCH, 12 * LONGEST_STRETCH, LONGEST_STRETCH):
        normalisers, _ = measure(torch.empty(2, vocabulary, device="cuda"))
        assert normalisers.shape == (2,)
    logprobs._fused.cache_clear()
