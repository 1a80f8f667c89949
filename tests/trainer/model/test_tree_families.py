"""Trees give every family that is computed over them what transformers' own attention gives each path alone.

Windows are shorter than the prompts, and the trees have three levels: a prompt, turns, and completions of each turn.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from transformers import AutoConfig, PreTrainedModel

from tests.sequences import trained_sequence
from tests.toy_models import noisy_model
from tests.trainer.model.test_rows import EXPERTS, HEADS, OTHERS, WINDOW
from tests.trainer.tiny import SHAPE, plain_forward
from trainer.algorithm import attention_layout
from trainer.algorithm.attention_layout import AttentionLayout, TreeMask
from trainer.algorithm.packing import TrainingGroup, pack
from trainer.config import TrainerSettings
from trainer.model import attention, sharding
from trainer.model.attention import TREE_ATTENTION, TREES, obstacle_to_trees
from trainer.model.loading import decoder_layers
from trainer.model.policy import Policy
from trainer.model.sharding import compile_layers

GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
MIXTURE = EXPERTS | {"num_local_experts": 4}
CUTS: dict[str, Any] = WINDOW | {"use_sliding_window": True}
SHARED: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": WINDOW["layer_types"] * 2, "num_kv_shared_layers": 2}
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", OTHERS["gpt_oss"]),
    "gemma2": ("gemma2", OTHERS["gemma2"] | {"query_pre_attn_scalar": 9}),
    "vaultgemma": ("vaultgemma", OTHERS["gemma2"]),
    "gemma3": ("gemma3_text", OTHERS["gemma3_text"] | {"query_pre_attn_scalar": 9}),
    "gemma4": ("gemma4_text", OTHERS["gemma4_text"] | {"global_head_dim": 32}),
    "gemma4, shared keys": ("gemma4_text", HEADS | WINDOW | SHARED | {"global_head_dim": 16}),
    "gemma4, experts": (
        "gemma4_text",
        HEADS | WINDOW | MIXTURE | {"global_head_dim": 16, "enable_moe_block": True, "top_k_experts": 2}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    **{name: (name, OTHERS[name]) for name in ("olmo3", "exaone4", "ministral", "cohere2")},
    "ministral3": ("ministral3", HEADS | {"sliding_window": 6}),
    "mistral": ("mistral", GROUPED | {"sliding_window": 6}),
    "mixtral": ("mixtral", GROUPED | MIXTURE | {"sliding_window": 6}),
    "phi3": ("phi3", GROUPED | {"sliding_window": 6}),
    "starcoder2": ("starcoder2", GROUPED | {"sliding_window": 6}),
    "smollm3": ("smollm3", HEADS | CUTS | {"no_rope_layers": [1, 0]}),
    "qwen2": ("qwen2", GROUPED | CUTS),
    "qwen3": ("qwen3", HEADS | CUTS),
    "qwen3_moe": ("qwen3_moe", HEADS | MIXTURE | CUTS),
    "cwm": ("cwm", HEADS | WINDOW | {"bos_token_id": 1}),
    "dots1": (
        "dots1",
        HEADS | WINDOW | MIXTURE | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"n_group": 1, "topk_group": 1},
    ),
    "exaone_moe": ("exaone_moe", HEADS | WINDOW | MIXTURE | {"mlp_layer_types": ["dense", "sparse"]}),
    **{name: (name, HEADS | WINDOW | MIXTURE) for name in ("granite_swa", "granitemoe_swa", "afmoe", "mellum")},
    "mimo_v2_flash": ("mimo_v2_flash", HEADS | WINDOW | MIXTURE),
}  # fmt: skip
"""The type of the model and its options: families whose layers have windows, sinks, caps or a rope of their own."""
FULL: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("cohere", GROUPED),
    "gemma": ("gemma", HEADS),
    "glm": ("glm", HEADS),
    "glm4": ("glm4", HEADS),
    "granite": ("granite", OTHERS["granite"]),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", HEADS),
    "llama": ("llama", GROUPED),
    "olmo": ("olmo", GROUPED),
    "olmo2": ("olmo2", GROUPED),
    "phi": ("phi", {}),
    "qwen2_moe": ("qwen2_moe", GROUPED | MIXTURE | {"shared_expert_intermediate_size": 24}),
    "seed_oss": ("seed_oss", HEADS),
}
FAMILIES = WINDOWED | FULL
QUICK = ("gpt_oss",)
"""Windows, sinks and experts."""


def test_every_type_is_tested() -> None:
    assert {kind for kind, _ in FAMILIES.values()} == TREES


@pytest.fixture(
    params=[pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FAMILIES],
)
def plain(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model with transformers' plainest attention."""
    return model_of(request.param)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let windows cut runs after 8 tokens, and 2,000 scores exist at the same time."""
    monkeypatch.setattr(attention_layout, "LONGEST_PART", 8)
    monkeypatch.setattr(attention, "MOST_SCORES", 2000)


def model_of(family: str) -> PreTrainedModel:
    kind, options = FAMILIES[family]
    config = AutoConfig.for_model(kind, **SHAPE | options)
    assert not obstacle_to_trees(config)
    model: PreTrainedModel = noisy_model(config, matrices=0.1, vectors=0.1).float().eval()
    model.set_attn_implementation("eager")
    return model


def over_trees(model: PreTrainedModel) -> Policy:
    copied = copy.deepcopy(model)
    copied.set_attn_implementation(TREE_ATTENTION)
    return Policy(copied, 1.0)


def tree(seed: int, lengths: Sequence[Sequence[int]]) -> TrainingGroup:
    """Return a tree with a prompt of 20 tokens, two turns, and completions of ``lengths`` after each turn."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(2, SHAPE["vocab_size"]) for _ in range(count)]

    prompt, turns = ids(20), [ids(9), ids(3)]
    paths = [turn + ids(n) for turn, completions in zip(turns, lengths, strict=True) for n in completions]
    sequences = [trained_sequence(path, [-1.0] * len(path), [1.0] * len(path)) for path in paths]
    return TrainingGroup(prompt, sequences, f"tree-{seed}")


TREES_OF_PROMPTS = [tree(1, [(7, 2, 12), (1, 5)]), tree(2, [(4,), (30, 3)])]


def gradients(logprobs: Tensor, model: torch.nn.Module) -> dict[str, Tensor]:
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad((weights * logprobs).sum(), list(named.values()), allow_unused=True)
    return {name: torch.zeros(()) if x is None else x for name, x in zip(named, found, strict=True)}


def alone(model: PreTrainedModel, groups: Sequence[TrainingGroup]) -> Tensor:
    """Return the log-probabilities of each completion by a forward pass of its path alone."""
    return torch.cat([logprobs for group in groups for logprobs, _ in plain_forward(model, group)])


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, expected in theirs.items():
        torch.testing.assert_close(
            ours[name], expected, rtol=0, atol=1e-5 * max(1, float(expected.abs().max())), msg=name
        )


def test_a_path_of_a_tree_is_computed_as_alone(plain: PreTrainedModel) -> None:
    policy = over_trees(plain)
    logprobs, expected = policy(pack(TREES_OF_PROMPTS)).logprobs, alone(plain, TREES_OF_PROMPTS)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    assert_close(gradients(logprobs, policy.model), gradients(expected, plain))


def test_bfloat16_rounds_no_more_than_the_plain_model(plain: PreTrainedModel) -> None:
    with torch.no_grad():
        exact = alone(plain, TREES_OF_PROMPTS)
        plain.bfloat16()
        theirs, ours = alone(plain, TREES_OF_PROMPTS), over_trees(plain)(pack(TREES_OF_PROMPTS)).logprobs
    # Both are sums over few tokens, and of experts some are chosen otherwise; a wrong formula is off a hundred times.
    assert 0 < (ours - exact).square().mean() < 4 * (theirs - exact).square().mean()


def test_nothing_else_in_the_micro_batch_changes_a_path(plain: PreTrainedModel) -> None:
    policy, (group, other) = over_trees(plain), TREES_OF_PROMPTS
    watched = group.sequences[-1]
    siblings = tree(3, [(25, 1), (6,)]).sequences
    found = []
    for groups in (
        [group],
        [other, group],
        [replace(group, sequences=group.sequences[::-1]), other],
        [replace(group, sequences=[*siblings, watched])],
    ):
        sequences = [sequence for one in groups for sequence in one.sequences]
        with torch.no_grad():
            parts = policy(pack(groups)).logprobs.split([sequence.tokens for sequence in sequences])
        found += [part for part, sequence in zip(parts, sequences, strict=True) if sequence is watched]
    assert len(found) == 4
    for logprobs in found[1:]:
        torch.testing.assert_close(logprobs, found[0], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_cuda_computes_what_a_processor_does(plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the formula that a kernel is compiled from, in layers that are traced whole, as on CUDA."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)
    results, found = [], []
    for order in (AttentionLayout, TreeMask):
        policy = over_trees(plain)
        if order is TreeMask:
            monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
            monkeypatch.setattr(sharding, "choose_kernel", lambda kernel: None)
            with suppress(ValueError):  # A model without experts has no such choice.
                policy.causal_lm().set_experts_implementation("grouped_mm")
            torch._dynamo.reset()
            compile_layers(decoder_layers(policy.causal_lm().base_model), TrainerSettings())
        results.append(policy(pack(TREES_OF_PROMPTS, order)).logprobs)
        found.append(gradients(results[-1], policy.model))
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)
    assert_close(*found)
