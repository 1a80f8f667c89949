"""Attention over packed trees of tokens, registered with transformers under the name ``token_tree``.

On CUDA one ``flex_attention`` computes it, over the tiles of ``TreeMask``. On a CPU it is computed in the blocks of
``AttentionLayout`` (attention_layout.py). The work of either grows with the lengths of the trees' paths and not with
the square of the packed row. Any model can use it whose attention goes through transformers' attention interface.

A model that needs more than softmax attention over the whole context would be trained on wrong numbers: it is computed
in rows, by its own forward pass (``obstacle_to_trees``).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.distributed_c10d import GroupName, _get_group_size_by_name
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from services.core.errors import ConfigurationError
from trainer.algorithm.attention_layout import AttentionLayout
from trainer.model.recurrent import LAYER_TYPES, RECURRENT, is_recurrent, obstacle_to_states

TREES = {
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "olmo",
        "olmo2",
        "glm",
        "glm4",
        "granite",
    ),
    *("cohere", "phi", "phi3", "gemma", "seed_oss", "starcoder2", "hunyuan_v1_dense"),
}
"""The types of models that are computed over trees of tokens, and are tested to be."""

SCORE_CAPS = ("attn_logit_softcapping", "logits_soft_cap")
"""Names in configurations for tanh caps of attention scores."""


def obstacle_to_trees(config: PretrainedConfig) -> str:
    """Return what keeps a model from being computed over trees of tokens; "" if nothing does."""
    if config.model_type not in TREES | RECURRENT or getattr(config, "auto_map", None):
        return "is not among the models that are computed over trees of tokens"
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        layer_types = ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]
    known = {"full_attention"} | (LAYER_TYPES if config.model_type in RECURRENT else set())
    if others := set(layer_types) - known:
        return f"has layers of type {', '.join(sorted(others))}"
    if is_recurrent(config) and (obstacle := obstacle_to_states(config)):
        return obstacle
    for name in SCORE_CAPS:
        if getattr(config, name, None) is not None:
            return f"caps attention scores ({name})"
    return ""


TREE_ATTENTION = "token_tree"

UNSUPPORTED_OPTIONS = ("sliding_window", "softcap", "s_aux")
"""Options with which models ask for sliding windows, capped scores or attention sinks."""

FLASH_PACKAGE = "flash-attn-4[cu13]==4.0.0b36"
"""The version whose kernels were compiled for the trees' mask."""

KERNELS: dict[str, Any] = {
    "triton": {"BACKEND": "TRITON", "IS_DIVISIBLE": True},
    "flash": {"BACKEND": "FLASH"},
}
"""Options of ``flex_attention`` by ATTENTION_KERNEL, one kernel for micro-batches of any length.

Rows are whole tiles (``TreeMask.row_length``), but with lengths that are variables torch would not know it, and would
compare each pair with the row's end: IS_DIVISIBLE says so. ROWS_GUARANTEED_SAFE must stay off, although every token
sees itself: the kernel goes through the keys tile by tile, and with that option a token that sees no key of its first
tile gets NaN."""

GRAPHS = 64
"""Most graphs that a process compiles of the layers, and of each function of logits. Policy, reference and critic count
together. torch's own limit is 8."""

HOPPER = (9, 0)
"""The compute capability of H100 and H200."""
ON_HOPPER: dict[int, dict[str, int]] = {64: {"fwd_num_warps": 8}, 128: {"fwd_BLOCK_N": 128, "fwd_num_stages": 2}}
"""Options of the Triton kernel by the width of bfloat16 heads, which the counts in docs/gpus.md prefer to torch's own.

With torch's 4 warps for heads of 64 the forward kernel spills registers, and a multiprocessor has room for these 4
only; with 8 it spills none and has room for 8. For heads of 128, tiles of 128 keys need a fifth fewer instructions."""

_chosen: dict[str, Any] = {"kernel": "triton", "capability": None}
"""The kernel of this process and the compute capability of its card; see ``choose_kernel``."""


def choose_kernel(kernel: str) -> None:
    """Choose the kernel of attention for this process's GPU, before the layers are compiled.

    Raises:
        ConfigurationError: its package is not installed, or it does not know the card.
    """
    capability = torch.cuda.get_device_capability()
    if kernel == "flash":
        if find_spec("flash_attn") is None:
            raise ConfigurationError(
                f"ATTENTION_KERNEL=flash: the package flash-attn-4 is missing; `pip install '{FLASH_PACKAGE}'` in the "
                "trainer's environment, or set ATTENTION_KERNEL=triton"
            )
        if capability < HOPPER:
            raise ConfigurationError(
                f"ATTENTION_KERNEL=flash: the card has compute capability {capability[0]}.{capability[1]}, and the "
                "kernel needs 9.0 (H100) or newer; set ATTENTION_KERNEL=triton"
            )
    _chosen.update(kernel=kernel, capability=capability)


def kernel_options(width: int, dtype: torch.dtype) -> Any:
    """Return the options of ``flex_attention`` for heads of ``width`` numbers."""
    options = KERNELS[_chosen["kernel"]]
    if (_chosen["kernel"], _chosen["capability"], dtype) == ("triton", HOPPER, torch.bfloat16):
        options = options | ON_HOPPER.get(width, {})
    return options


class SharedLayout(NamedTuple):
    """The layout of a micro-batch of which each rank of a context group has an equal part of the tokens."""

    whole: AttentionLayout | BlockMask
    group: str
    """The name of the process group."""


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    layout: AttentionLayout | BlockMask | SharedLayout,
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
        layout: the layout of the micro-batch, prepared. With one that is shared, T counts this rank's tokens.
        options: other options of the model; those in UNSUPPORTED_OPTIONS must be None, the rest is ignored.

    Returns:
        ([1, T, H, D], None).

    Raises:
        ConfigurationError: the model asks for dropout or an unsupported option.
    """
    unsupported = [name for name in UNSUPPORTED_OPTIONS if options.get(name) is not None] + ["dropout"] * (dropout != 0)
    if unsupported:
        raise ConfigurationError(
            f"MODEL_NAME: the model's attention has {', '.join(unsupported)}, which trees of tokens do not support; "
            "set LAYOUT=rows"
        )
    if isinstance(layout, SharedLayout):
        query, key, value = (_to_heads(x, layout.group) for x in (query, key, value))
        return _to_tokens(_attend(query, key, value, scaling, layout.whole), layout.group), None
    return _attend(query, key, value, scaling, layout), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, layout: AttentionLayout | BlockMask
) -> Tensor:
    """Return the attention [1, T, H, D]; see ``tree_attention``."""
    if isinstance(layout, BlockMask):
        options = kernel_options(query.shape[-1], query.dtype)
        output = flex_attention(
            query, key, value, block_mask=layout, scale=scaling, enable_gqa=True, kernel_options=options
        )
        return output.transpose(1, 2)
    return _in_blocks(query, key, value, scaling, layout)


def _to_heads(states: Tensor, group: str) -> Tensor:
    """Return all tokens' states of this rank's heads, [1, H / C, C T, D], from those of its T tokens, [1, H, T, D].

    With fewer heads than the C ranks of the group, which key-value heads may be, several ranks get the same head.
    """
    size, (heads, tokens, width) = _size(group), states.shape[1:]
    if heads < size:
        states = states[:, :, None].expand(-1, -1, size // heads, -1, -1)
    parts = _exchange(states.reshape(size, -1, tokens, width), group)
    return parts.transpose(0, 1).flatten(1, 2)[None]


def _to_tokens(states: Tensor, group: str) -> Tensor:
    """Return all heads' states of this rank's tokens, [1, T, H, D], from those of its heads, [1, C T, H / C, D]."""
    parts = _exchange(states[0].unflatten(0, (_size(group), -1)), group)
    return parts.transpose(0, 1).flatten(1, 2)[None]


def _exchange(parts: Tensor, group: str) -> Tensor:
    """Send part r of [C, ...] to rank r of the group, for every r; return the parts that the ranks send to this one."""
    return collectives.all_to_all_single_autograd(parts.contiguous(), None, None, cast("GroupName", group))


def _size(group: str) -> int:
    return _get_group_size_by_name(cast("GroupName", group))


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, layout: AttentionLayout) -> Tensor:
    """Return the attention [1, T, H, D], computed block by block in float32; see ``tree_attention``.

    torch's attention for CPUs takes 30 times as long for the backward pass in bfloat16 as in float32.
    """
    q, k, v = (x[0].transpose(0, 1).float() for x in (query, key, value))
    outputs = []
    for block in layout.blocks:
        own_q, seen_k, seen_v = _heads(q, block.query_rows), _heads(k, block.key_rows), _heads(v, block.key_rows)
        output = scaled_dot_product_attention(
            own_q,
            seen_k,
            seen_v,
            attn_mask=block.mask,
            is_causal=block.is_causal,
            scale=scaling,
            enable_gqa=query.shape[1] > key.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return _rows(torch.cat(outputs), layout.unpack)[None].to(query.dtype)


def _heads(states: Tensor, rows: Tensor) -> Tensor:
    """Return the states [T, H, D] at ``rows`` [R, L] as [R, H, L, D]."""
    return _rows(states, rows).transpose(1, 2)


def _rows(states: Tensor, rows: Tensor) -> Tensor:
    """Return ``states[rows]``. The gradient of indexing would add up repeated rows number by number."""
    return embedding(rows, states.flatten(1)).view(*rows.shape, *states.shape[1:])


AttentionInterface.register(TREE_ATTENTION, tree_attention)
