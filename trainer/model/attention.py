"""Attention over packed trees of tokens, registered with transformers under the name ``token_tree``.

It is computed in the blocks of attention_layout.py, so the work grows with the lengths of the trees' paths and not with
the square of the packed row. Any model can use it whose attention goes through transformers' attention interface.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface

from services.core.errors import ConfigurationError
from trainer.algorithm.attention_layout import AttentionLayout
from trainer.model.supported import FAMILIES

TREE_ATTENTION = "token_tree"

UNSUPPORTED_OPTIONS = ("sliding_window", "softcap", "s_aux")
"""Options with which models ask for sliding windows, capped scores or attention sinks."""


def tree_attention(
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
        layout: the blocks of the micro-batch, with their masks.
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
    outputs = []
    for block in layout.blocks:
        own_q, seen_k, seen_v = _heads(q, block.query_rows), _heads(k, block.key_rows), _heads(v, block.key_rows)
        output = _attend(own_q, seen_k, seen_v, attn_mask=block.mask, is_causal=block.is_causal, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return _rows(torch.cat(outputs), layout.unpack)[None], None


def _heads(states: Tensor, rows: Tensor) -> Tensor:
    """Return the states [T, H, D] at ``rows`` [R, L] as [R, H, L, D]."""
    return _rows(states, rows).transpose(1, 2)


def _rows(states: Tensor, rows: Tensor) -> Tensor:
    """Return ``states[rows]``. The gradient of indexing would add up repeated rows number by number."""
    return embedding(rows, states.flatten(1)).view(*rows.shape, *states.shape[1:])


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return scaled dot-product attention of H query heads to H_kv key heads."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and query.is_cuda:
        # On a GPU the key heads are copied: with a mask, or in float32, enable_gqa allows only the kernel that keeps
        # every score for the backward pass.
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        repeats = 1
    return scaled_dot_product_attention(query, key, value, enable_gqa=repeats > 1, **options)


AttentionInterface.register(TREE_ATTENTION, tree_attention)
