"""Attention over packed groups, registered with transformers under the name ``shared_prompt``.

The packed row of a micro-batch (see packing.py) is cut into two batches: prompts, which attend causally to themselves,
and completions, which attend to their prompt and causally to themselves. So the work grows with the size of the groups
and not with the square of the row. Any model can use it whose attention goes through transformers' attention interface.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.core.errors import ConfigurationError
from trainer.algorithm.packing import AttentionLayout
from trainer.model.supported import FAMILIES

SHARED_PROMPT_ATTENTION = "shared_prompt"

UNSUPPORTED_OPTIONS = ("sliding_window", "softcap", "s_aux")
"""Options with which models ask for sliding windows, capped scores or attention sinks."""


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
    """Compute the attention of T packed tokens of a micro-batch, as transformers' attention interface asks for it.

    Args:
        module: the attention layer; not used.
        query: [1, H, T, D].
        key: [1, H_kv, T, D]; H is a multiple of H_kv.
        value: [1, H_kv, T, D].
        attention_mask: not used, because the layout has the mask.
        scaling: factor of the scores; 1 / sqrt(D) by default.
        dropout: must be 0.
        layout: the places of prompts and completions.
        options: other options of the model; those in UNSUPPORTED_OPTIONS must be None, the rest is ignored.

    Returns:
        ([1, T, H, D], None).

    Raises:
        ConfigurationError: the model asks for dropout or an unsupported option.
    """
    asked = [name for name in UNSUPPORTED_OPTIONS if options.get(name) is not None] + ["dropout"] * (dropout != 0)
    if asked:
        raise ConfigurationError(
            f"MODEL_NAME: the model's attention has {', '.join(asked)}, which the trainer does not support; "
            f"choose a model of another family ({FAMILIES})"
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
    """Return scaled dot-product attention of H query heads to H_kv key heads."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and query.is_cuda:
        # On a GPU the key heads are copied: with a mask, or in float32, enable_gqa allows only the kernel that keeps
        # every score for the backward pass.
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        repeats = 1
    return scaled_dot_product_attention(query, key, value, enable_gqa=repeats > 1, **options)


AttentionInterface.register(SHARED_PROMPT_ATTENTION, shared_prompt_attention)
