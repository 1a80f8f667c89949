"""Packed trees of tokens give what a plain forward pass of each completion gives."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.attention import flex_attention
from transformers import AutoModelForCausalLM

from services.core.errors import ConfigurationError
from tests.trainer.tiny import FAMILIES, SHAPE, plain_logprobs, plain_model, random_groups, random_trees, save_model
from trainer.algorithm.attention_layout import AttentionLayout, TreeMask
from trainer.algorithm.packing import pack
from trainer.model import policy as policies
from trainer.model.attention import TREE_ATTENTION, tree_attention
from trainer.model.logprobs import token_logprobs
from trainer.model.policy import Policy

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-5}


QUICK = ("qwen2", "qwen3_moe")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FAMILIES],
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), FAMILIES[request.param])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets logits exist for seven tokens at a time, so that a micro-batch has several chunks."""
    monkeypatch.setattr(policies, "token_logprobs", partial(token_logprobs, chunk_tokens=7))


def packed_policy(directory: Path, temperature: float = 1.0) -> Policy:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=TREE_ATTENTION)
    return Policy(model, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_are_those_of_each_completion_alone(directory: Path, temperature: float) -> None:
    groups = [*random_groups(1), *random_groups(2, n_groups=2, n_completions=1), *random_groups(3, longest=40)]
    logprobs, entropies, *_ = packed_policy(directory, temperature)(pack(groups))
    model = plain_model(directory)
    expected = [x for group in groups for x in plain_logprobs(model, group, temperature)]
    torch.testing.assert_close(logprobs, torch.cat(expected), **CLOSE)
    assert entropies.shape == logprobs.shape


def test_the_gradient_is_the_sum_of_the_completions_own(directory: Path) -> None:
    groups, policy, model = random_groups(4), packed_policy(directory), plain_model(directory)
    weights = torch.randn(pack(groups).targets.shape, generator=torch.Generator().manual_seed(0))
    (policy(pack(groups))[0] * weights).sum().backward()
    (torch.cat([x for group in groups for x in plain_logprobs(model, group)]) * weights).sum().backward()
    assert_same_gradients(policy, model)


def assert_same_gradients(policy: Policy, model: torch.nn.Module) -> None:
    ours = dict(policy.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_the_attention_of_cuda_computes_what_that_of_a_cpu_does(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the formula that a kernel is compiled from; torch refuses its backward pass on a CPU, though it is exact."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)
    groups = [*random_groups(1, longest=40), *random_trees(2, n_groups=4)]
    gradients, results = [], []
    for order in (AttentionLayout, TreeMask):
        policy, batch = packed_policy(directory), pack(groups, order)
        weights = torch.randn(batch.targets.shape, generator=torch.Generator().manual_seed(0))
        logprobs = policy(batch).logprobs
        (logprobs * weights).mean().backward()
        results.append(logprobs)
        gradients.append({name: parameter.grad for name, parameter in policy.named_parameters()})
    torch.testing.assert_close(*results, **CLOSE)
    torch.testing.assert_close(*gradients, **CLOSE)


def test_mistral_without_a_window_is_computed_right(tmp_path: Path) -> None:
    save_model(tmp_path, transformers.MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=None))
    (group,) = random_groups(7, n_groups=1)
    logprobs = packed_policy(tmp_path)(pack([group])).logprobs
    torch.testing.assert_close(logprobs, torch.cat(plain_logprobs(plain_model(tmp_path), group)), **CLOSE)


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"sliding_window": 7}, {"position_bias": torch.zeros(1)}])
def test_attention_that_is_not_known_is_refused(options: dict[str, Any]) -> None:
    batch = pack(random_groups(0, n_groups=1))
    states = torch.zeros(1, 2, len(batch.input_ids), 4)
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        tree_attention(torch.nn.Identity(), states, states, states, None, layout=batch.layout.prepared((6,)), **options)
