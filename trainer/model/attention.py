"""Attention over packed groups, plugged into transformers' models under the name ``shared_prompt``.

The packed row of a micro-batch (see packing.py) is cut into two batches: the prompts, each attending causally to
itself, and the completions, each attending to its prompt and causally to itself. The work is that of the group's own
tokens, not of the square of the row, and any model whose attention goes through transformers' attention interface can
use it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.core.errors import ConfigurationError
from trainer.algorithm.packing import AttentionLayout

SHARED_PROMPT_ATTENTION = "shared_prompt"

UNSUPPORTED_OPTIONS = ("sliding_window", "softcap", "s_aux")
"""Options by which models ask for windows, capped scores or attention sinks."""


def shared_prompt_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    layout: AttentionLayout,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of T packed tokens as ``layout`` says.

    Args:
        module: the attention layer; not used.
        query: [1, H, T, D].
        key: [1, H_kv, T, D]; H is a multiple of H_kv.
        value: [1, H_kv, T, D].
        attention_mask: not used: the layout says who sees whom.
        scaling: factor of the scores; 1 / sqrt(D) by default.
        dropout: must be 0.
        layout: where prompts and completions lie.
        options: what else a model passes; most of it is of no concern here.

    Returns:
        ([1, T, H, D], None), as transformers' attention interface has it.

    Raises:
        ConfigurationError: the model asks for what this attention does not do.
    """
    asked = [name for name in UNSUPPORTED_OPTIONS if options.get(name) is not None] + ["dropout"] * (dropout != 0)
    if asked:
        raise ConfigurationError(
            f"MODEL_NAME: the model's attention has {', '.join(asked)}, which the trainer does not support; "
            "choose a model of another family (Qwen2, Qwen3, Llama, ...)"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))

    prompt_q, prompt_k, prompt_v = (x[layout.prompt_rows].transpose(1, 2) for x in (q, k, v))
    prompts = _attend(prompt_q, prompt_k, prompt_v, is_causal=True, scale=scaling)

    own_q, own_k, own_v = (x[layout.completion_rows].transpose(1, 2) for x in (q, k, v))
    seen_k = torch.cat([prompt_k[layout.piece_of_completion], own_k], dim=2)
    seen_v = torch.cat([prompt_v[layout.piece_of_completion], own_v], dim=2)
    completions = _attend(own_q, seen_k, seen_v, attn_mask=layout.mask, scale=scaling)

    rows = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in (prompts, completions)])
    return rows[layout.unpack][None], None


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Scaled dot-product attention of H query heads to H_kv key heads, where the kernels allow without a copy."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and query.is_cuda:
        # With a mask, or in float32, enable_gqa leaves only the kernel that keeps every score for the backward pass.
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        repeats = 1
    return scaled_dot_product_attention(query, key, value, enable_gqa=repeats > 1, **options)


AttentionInterface.register(SHARED_PROMPT_ATTENTION, shared_prompt_attention)
