"""Recurrent layers over trees give what a plain forward pass of each path gives, and keep siblings apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.sequences import trained_sequence
from tests.toy_models import noisy_model
from tests.trainer.model.test_rows import OTHERS
from tests.trainer.tiny import SHAPE, plain_forward
from trainer.algorithm.packing import TrainingGroup, pack
from trainer.model.attention import TREE_ATTENTION
from trainer.model.loading import decoder_layers
from trainer.model.policy import Policy
from trainer.model.recurrent import check_states, share_states

MAMBA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
NEMOTRON: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "num_hidden_layers": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
}
LFM2_MOE = {
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention"],
}
FAMILIES = {name: OTHERS[name] for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2")} | {
    "lfm2_moe": LFM2_MOE,
    "granitemoehybrid": MAMBA,
    "nemotron_h": NEMOTRON,
}
QUICK = ("qwen3_5_text",)

families = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FAMILIES]
)


def models_of(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a tiny model over trees, and the same by transformers alone."""
    config = SHAPE | FAMILIES[family]
    plain = noisy_model(AutoConfig.for_model(family, **config), matrices=0.1, vectors=0.1).float().eval()
    over_trees = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **config), attn_implementation=TREE_ATTENTION
    ).eval()
    over_trees.load_state_dict(plain.state_dict())
    share_states(over_trees)
    check_states(decoder_layers(over_trees.base_model))
    return over_trees, plain
