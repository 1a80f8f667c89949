"""Rows of paths, through a model's own forward pass, give what a plain forward pass of each completion gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.core.errors import ConfigurationError
from tests.toy_models import noisy_model
from tests.trainer.algorithm.shapes import fast, groups_of_many_shapes
from tests.trainer.model.test_micro_batching import completions
from tests.trainer.tiny import FAMILIES, SHAPE, plain_forward, random_groups, save_model
from trainer.algorithm.attention_layout import PathRows
from trainer.algorithm.packing import TrainingGroup, pack
from trainer.config import Layout, TrainerSettings
from trainer.model.learner import Learner
from trainer.model.loading import choose_layout, decoder_layers, with_adapters
from trainer.model.logprobs import check_logits
from trainer.model.micro_batching import MOST_PADDING, share_out_rows
from trainer.model.policy import Policy, load_policy
from trainer.model.ranks import Ranks
from trainer.model.recurrent import is_recurrent

DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOW: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}

OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": HEADS | DELTA,
    "qwen3_5_moe_text": HEADS | DELTA | EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_next": HEADS | DELTA | EXPERTS | {"shared_expert_intermediate_size": 24},
    "gemma2": HEADS | WINDOW | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "gemma3_text": HEADS | WINDOW,
    "gemma4_text": HEADS | WINDOW,
    "gpt_oss": HEADS | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": {"num_key_value_heads": 2} | WINDOW,
    "exaone4": HEADS | WINDOW,
    "ministral": HEADS | {"sliding_window": 6},
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "granite": {"num_key_value_heads": 2, "logits_scaling": 3.0},
    "cohere2": HEADS | WINDOW | {"logit_scale": 0.3},
    "phi": {},
    "gpt2": {},
}
QUICK = ("qwen3_5_text", "gemma2", "gpt_oss", "phi")
"""Recurrent layers, caps, sinks and windows, a bias of the logits."""


def model_of(family: str) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **SHAPE, **OTHERS[family])
    model: PreTrainedModel = noisy_model(config, matrices=0.1, vectors=0.1).float().eval()
    return model


def packed(groups: list[TrainingGroup]) -> Any:
    return pack(groups, PathRows)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in OTHERS]
)
def test_log_probabilities_and_gradients_are_those_of_each_completion_alone(family: str) -> None:
    """Either float32 gradient of Gemma 4 is up to 1.5e-5 of the largest off the float64 one, by the processor."""
    model, groups = model_of(family), [*random_groups(1), *random_groups(2, n_groups=1, longest=24)]
    check_logits(model)
    batch = packed(groups)
    outputs = Policy(model, 0.7)(batch)
    weights = torch.randn(2, len(batch.targets), generator=torch.Generator().manual_seed(0))

    def gradients(logprobs: Tensor, entropies: Tensor) -> list[Tensor]:
        total = (weights * torch.stack([logprobs, entropies])).sum()
        return list(torch.autograd.grad(total, [p for p in model.parameters() if p.requires_grad], allow_unused=True))

    ours = gradients(outputs.logprobs, outputs.entropies)
    alone = [torch.cat(parts) for parts in zip(*(x for g in groups for x in plain_forward(model, g, 0.7)), strict=True)]
    torch.testing.assert_close(outputs.logprobs, alone[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.entropies, alone[1], rtol=0, atol=1e-5)
    for (name, _), mine, theirs in zip(model.named_parameters(), ours, gradients(*alone), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-5 * max(1.0, float(theirs.abs().max())), msg=name)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_a_step_is_the_same_by_either_layout(alone: Ranks, tmp_path: Path, family: str) -> None:
    model = save_model(tmp_path, FAMILIES[family])
    updates, weights = [], []
    for layout in (Layout.TREE, Layout.ROWS):
        settings = TrainerSettings(model_name=str(model), layout=layout, micro_batch_tokens=64)
        ranks = alone.laid_out(layout)
        policy = load_policy(settings, ranks)
        updates.append(Learner(settings, policy, ranks, 1).update(random_groups(4), 0).metrics)
        weights.append({name: x.detach().clone() for name, x in policy.named_parameters()})
    assert updates[0] == pytest.approx(updates[1], abs=1e-5)
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)


@fast
@given(groups=groups_of_many_shapes(), n_ranks=st.integers(1, 5), max_tokens=st.integers(1, 200))
def test_rows_of_a_micro_batch_are_of_similar_lengths(
    groups: list[TrainingGroup], n_ranks: int, max_tokens: int
) -> None:
    shares = share_out_rows(groups, n_ranks, max_tokens)
    assert len({len(batches) for batches in shares}) == 1
    assert completions([piece for batches in shares for pieces in batches for piece in pieces]) == completions(groups)
    for pieces in (pieces for batches in shares for pieces in batches if pieces):
        lengths = [piece.tokens for piece in pieces]
        padded = len(lengths) * max(lengths)
        assert len(lengths) == 1 or padded <= max_tokens
        assert sum(lengths) >= (1 - MOST_PADDING) * padded


def test_rows_of_equal_lengths_fill_micro_batches() -> None:
    [group] = random_groups(1, n_groups=1, n_completions=1)
    alike = replace(group, sequences=group.sequences * 8)
    [batches] = share_out_rows([alike], 1, 4 * (len(group.prompt_ids) + group.sequences[0].tokens))
    assert [sum(len(piece.sequences) for piece in batch) for batch in batches] == [4, 4]


@pytest.mark.parametrize(
    ("family", "options", "layout", "expected"),
    [
        *((family, {}, "auto", Layout.TREE) for family in ("llama", "qwen3", "qwen3_moe")),
        *((family, OTHERS[family], "auto", Layout.TREE) for family in ("gemma2", "gpt_oss", "qwen3_5_text", "lfm2")),
        ("granitemoehybrid", {"mamba_n_heads": 4, "layer_types": ["full_attention"] * 2}, "auto", Layout.TREE),
        ("mistral", {"sliding_window": 8}, "auto", Layout.TREE),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "auto", Layout.ROWS),
        ("gemma3_text", {"use_bidirectional_attention": True}, "auto", Layout.ROWS),
        ("bloom", {}, "auto", Layout.ROWS),
        ("qwen3", {}, "rows", Layout.ROWS),
        ("bloom", {}, "tree", None),
    ],
)
def test_trees_are_taken_where_every_layer_is_known(
    family: str, options: dict[str, Any], layout: str, expected: Layout | None
) -> None:
    configs = [AutoConfig.for_model("qwen3", **SHAPE), AutoConfig.for_model(family, **SHAPE, **options)]
    settings = TrainerSettings(layout=layout)
    if expected is None:
        with pytest.raises(ConfigurationError, match=f"LAYOUT=tree: {family}"):
            choose_layout(settings, configs)
        return
    assert choose_layout(settings, configs) is expected
    if expected is Layout.ROWS or is_recurrent(configs[1]):
        with pytest.raises(ConfigurationError, match="CONTEXT_PARALLEL_SIZE=2"):
            choose_layout(settings.model_copy(update={"context_parallel_size": 2}), configs)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "bloom"])
def test_flash_attention_is_refused_where_trees_need_more_than_its_mask(family: str) -> None:
    settings, plain = TrainerSettings(attention_kernel="flash"), AutoConfig.for_model("qwen3", **SHAPE)
    assert choose_layout(settings, [plain]) is Layout.TREE
    with pytest.raises(ConfigurationError, match="ATTENTION_KERNEL"):
        choose_layout(settings, [plain, AutoConfig.for_model(family, **SHAPE)])


def test_logits_of_a_models_own_way_are_refused(model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    check_logits(loaded)
    head = loaded.get_output_embeddings()
    head.register_forward_hook(lambda _module, _inputs, logits: logits * 1.01)
    with pytest.raises(ConfigurationError, match="logits"):
        check_logits(loaded)


def test_adapters_of_transposed_matrices_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="LORA_RANK: gpt2"):
        with_adapters(model_of("gpt2"), TrainerSettings(lora_rank=2))


def test_layers_are_those_that_a_model_says_must_not_be_split() -> None:
    assert [type(layer).__name__ for layer in decoder_layers(model_of("gpt2").base_model)] == ["GPT2Block"] * 2
