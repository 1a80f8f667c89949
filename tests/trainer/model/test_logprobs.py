"""Chunked log-probabilities are those of the whole logits, without ever holding them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model import logprobs as module
from trainer.model.logprobs import LEAST_STRETCH, _measure, token_logprobs

N, U, D, V = 37, 29, 12, 53

STATES = torch.randint(0, U, (N,), generator=torch.Generator().manual_seed(2))
"""The state that predicts each target. Some predict several, some of the same token, and some predict none."""


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """In float64, and back to float32."""
    logprobs = (hidden[STATES].double() @ weight.T.double() / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1).float(), -(logprobs.exp() * logprobs).sum(1).float()


def random_inputs(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, D, generator=generator) * scale for rows in (U, V))
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[torch.isin(STATES, STATES[:1])] = targets[0]
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("chunk", [1, 5, 37, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_are_those_of_the_whole_logits(chunk: int, temperature: float) -> None:
    hidden, weight, targets = random_inputs()
    results = token_logprobs(hidden, weight, targets, STATES, temperature, chunk)
    for result, expected in zip(results, naive(hidden, weight, targets, temperature), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 5, 37, 1000])
@pytest.mark.parametrize("of", ["logprobs", "entropies", "both"])
def test_gradients_are_those_of_the_whole_logits(chunk: int, of: str) -> None:
    hidden, weight, targets = random_inputs()
    per_token = torch.randn(2, N, generator=torch.Generator().manual_seed(1))

    def loss(results: tuple[Tensor, Tensor]) -> Tensor:
        parts = [(result * w).sum() for result, w in zip(results, per_token, strict=True)]
        chosen: Tensor = {"logprobs": parts[0], "entropies": parts[1], "both": parts[0] + parts[1]}[of]
        return chosen

    ours = torch.autograd.grad(loss(token_logprobs(hidden, weight, targets, STATES, 0.8, chunk)), (hidden, weight))
    expected = torch.autograd.grad(loss(naive(hidden, weight, targets, 0.8)), (hidden, weight))
    for result, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [5, 1000])
def test_a_second_backward_pass_gives_the_same_gradients(chunk: int) -> None:
    """The first backward pass uses up the logits that the forward pass left."""
    hidden, weight, targets = random_inputs()
    logprobs, entropies = token_logprobs(hidden, weight, targets, STATES, 0.8, chunk)
    loss = logprobs.sum() + entropies.square().sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("trained", [(True, False), (False, True)], ids=["hidden", "weight"])
def test_only_what_is_trained_gets_a_gradient(trained: tuple[bool, bool]) -> None:
    hidden, weight, targets = random_inputs()
    hidden.requires_grad_(trained[0])
    weight.requires_grad_(trained[1])
    token_logprobs(hidden, weight, targets, STATES)[0].sum().backward()
    assert (hidden.grad is not None, weight.grad is not None) == trained


def test_logits_far_apart_give_finite_numbers() -> None:
    hidden, weight, targets = random_inputs(scale=30.0)
    logprobs, entropies = token_logprobs(hidden, weight, targets, STATES, chunk_tokens=8)
    (logprobs.sum() + entropies.sum()).backward()
    assert hidden.grad is not None
    assert logprobs.isfinite().all()
    assert (entropies >= 0).all()
    assert hidden.grad.isfinite().all()


def bfloat16_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs with logits of about 30, as language models have. bfloat16 would round them to multiples of an eighth."""
    hidden, weight, targets = (x.detach() for x in random_inputs(scale=0.5))
    hidden[:, 0], weight[:, 0] = 6.0, 5.0
    return hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), targets


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_bfloat16_inputs_have_the_values_of_a_float32_head(temperature: float) -> None:
    hidden, weight, targets = bfloat16_inputs()
    results = token_logprobs(hidden, weight, targets, STATES, temperature, 8)
    for result, expected in zip(results, naive(hidden, weight, targets, temperature), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("of", [0, 1], ids=["logprobs", "entropies"])
def test_bfloat16_inputs_have_the_gradients_of_a_float32_head(of: int) -> None:
    """Up to the rounding of the gradients themselves, which are bfloat16 (and on some processors their factors)."""
    hidden, weight, targets = bfloat16_inputs()
    ours = torch.autograd.grad(token_logprobs(hidden, weight, targets, STATES, 1.0, 8)[of].sum(), (hidden, weight))
    exact = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    expected = torch.autograd.grad(naive(*exact, targets, 1.0)[of].sum(), exact)
    for result, other in zip(ours, expected, strict=True):
        assert (result - other).norm() / other.norm() < 3e-3


def test_other_products_keep_their_precision() -> None:
    """oneDNN's precision of float32 products is a setting of the whole process."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    hidden, weight, targets = bfloat16_inputs()
    token_logprobs(hidden, weight, targets, STATES)[0].sum().backward()
    assert matmul.fp32_precision == before


@pytest.mark.parametrize("vocabulary", [3 * LEAST_STRETCH, 4096, 53], ids=["stretches", "longest", "one"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0])
def test_the_numbers_of_a_row_are_those_of_its_softmax(vocabulary: int, scale: float) -> None:
    logits = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(0)) * scale
    exact = logits.double().log_softmax(1)
    normalisers, entropies = _measure(logits)
    torch.testing.assert_close(normalisers, (logits[:, 0].double() - exact[:, 0]).float())
    torch.testing.assert_close(entropies, -(exact.exp() * exact).sum(1).float(), rtol=1e-5, atol=2e-6)


def test_no_tokens_have_no_logprobs_and_no_gradient() -> None:
    hidden, weight, _ = random_inputs()
    logprobs, entropies = token_logprobs(hidden[:0], weight, *torch.empty(2, 0, dtype=torch.int64))
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0


class LargestTensor(TorchDispatchMode):
    """Remembers how many numbers the largest tensor that any operation made had."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else [result]
        self.numbers = max(
            [self.numbers, *(x.untyped_storage().size() // x.itemsize for x in made if isinstance(x, Tensor))]
        )
        return result


def largest_tensor(n_tokens: int, vocabulary: int, chunk: int) -> int:
    hidden = torch.randn(n_tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    largest = LargestTensor()
    with largest:
        logprobs, entropies = token_logprobs(
            hidden, weight, torch.zeros(n_tokens, dtype=torch.int64), torch.arange(n_tokens), 1.0, chunk
        )
        (logprobs.sum() + entropies.sum()).backward()
    return largest.numbers


def test_no_tensor_grows_with_tokens_times_vocabulary() -> None:
    chunk, vocabulary = 16, 1000
    assert largest_tensor(64, vocabulary, chunk) == chunk * vocabulary
    assert largest_tensor(1024, vocabulary, chunk) == chunk * vocabulary
    assert largest_tensor(1024, vocabulary, 1024) == 1024 * vocabulary, "what is measured is what would grow"


def test_the_head_is_compiled_for_more_vocabularies_than_torch_allows_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run may have a policy and several teachers, each with graphs for one row and for many."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    normalise = module._fused.__wrapped__(module._normalise, torch.device("cuda"))
    for vocabulary in range(20, 30):
        logits = torch.randn(3, vocabulary)
        normalisers, _ = normalise(logits.clone(), None)
        torch.testing.assert_close(normalisers, logits.logsumexp(1))
