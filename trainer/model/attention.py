"""Attention over packed trees of tokens, registered with transformers under the name ``token_tree``.

On CUDA one ``flex_attention`` computes it, over the tiles of ``TreeMask``. On a CPU it is computed in the blocks of
``AttentionLayout`` (attention_layout.py). The work of either grows with the lengths of the trees' paths and not with
the square of the packed row. Any model can use it whose attention goes through transformers' attention interface.

Each layer says by the options of that interface what its attention is: its window, the cap and the scale of its scores,
its sinks. A model that needs more would be trained on wrong numbers: it is computed in rows, by its own forward pass
(``obstacle_to_trees``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.distributed_c10d import GroupName, _get_group_size_by_name
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PretrainedConfig

from services.core.errors import ConfigurationError
from trainer.algorithm.attention_layout import AttentionLayout, Block, hidden
from trainer.model.recurrent import LAYER_TYPES, RECURRENT, is_recurrent, obstacle_to_states, rows_of

TREES = {
    *("llama", "mistral", "mixtral", "ministral", "ministral3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
    *("olmo", "olmo2", "olmo3", "glm", "glm4", "granite", "granite_swa", "granitemoe_swa", "cohere", "cohere2", "cwm"),
    *("phi", "phi3", "gemma", "gemma2", "gemma3_text", "gemma4_text", "vaultgemma", "gpt_oss", "exaone4", "exaone_moe"),
    *("seed_oss", "starcoder2", "hunyuan_v1_dense", "dots1", "afmoe", "mellum", "mimo_v2_flash"),
}
"""The types of models that are computed over trees of tokens, and are tested to be."""

WITHOUT_WINDOWS = ("qwen2_moe",)
"""Those of them whose layers have their window in transformers' mask alone, which trees do not read."""


def obstacle_to_trees(config: PretrainedConfig) -> str:
    """Return what keeps a model from being computed over trees of tokens; "" if nothing does."""
    if config.model_type not in TREES | RECURRENT or getattr(config, "auto_map", None):
        return "is not among the models that are computed over trees of tokens"
    layer_types = getattr(config, "layer_types", None) or ()
    known = {"full_attention", "sliding_attention"} | (LAYER_TYPES if config.model_type in RECURRENT else set())
    if others := set(layer_types) - known:
        return f"has layers of type {', '.join(sorted(others))}"
    if "sliding_attention" in layer_types and config.model_type in WITHOUT_WINDOWS:
        return "has layers with a window that their attention is not told"
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return "lets tokens see later ones (use_bidirectional_attention)"
    if is_recurrent(config) and (obstacle := obstacle_to_states(config)):
        return obstacle
    return ""


TREE_ATTENTION = "token_tree"

HARMLESS = ("position_ids", "seq_idx", "use_cache", "output_attentions")
"""Options of attention that change nothing here: the layout has the positions, and the rest is for other layers."""

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


Layouts = Mapping[int | None, AttentionLayout | BlockMask]
"""The layout of a micro-batch, prepared, for each window that a layer may have; None is that of full attention."""


class SharedLayout(NamedTuple):
    """The layouts of a micro-batch of which each rank of a context group has an equal part of the tokens."""

    whole: Layouts
    group: str
    """The name of the process group."""
    rank: int
    """This rank in the group."""


def windows_of(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return the windows that layers may have, by a model's configuration; None stands for full attention."""
    return tuple(dict.fromkeys((None, getattr(config, "sliding_window", None) or None)))


def has_plain_scores(config: PretrainedConfig) -> bool:
    """Return whether no layer has a window or a cap; no family has sinks without windows."""
    return windows_of(config) == (None,) and getattr(config, "attn_logit_softcapping", None) is None


@dataclass(frozen=True)
class Scores:
    """The function from products of queries and keys to weights: softmax of cap tanh(scale q k / cap), with a sink."""

    scale: float | None
    """1 / sqrt(D) by default."""
    cap: float | None
    sinks: Tensor | None
    """[H], a score of each head that takes its part of the softmax, and has no value."""

    def of_sinks(self, output: Tensor, normalisers: Tensor) -> Tensor:
        """Return attention [R, H, Q, D] with sinks, from that without and from its log-sum-exp [R, H, Q] float32."""
        assert self.sinks is not None
        rest = torch.sigmoid(normalisers - self.sinks.float()[:, None])
        return (output * rest[..., None]).to(output.dtype)

    def capped(self, score: Tensor, *_place: Tensor) -> Tensor:
        """Return the capped score, as ``flex_attention`` asks for it."""
        assert self.cap is not None
        return self.cap * torch.tanh(score / self.cap)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    layout: Layouts | SharedLayout,
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
        sliding_window: tokens of its path that a token sees, itself included; by default all of them.
        softcap: cap of the scores, by a hyperbolic tangent.
        s_aux: [H], the sinks of the heads; see ``Scores``.
        layout: the layouts of the micro-batch. With those that are shared, T counts this rank's tokens.
        options: other options of the model, which must be None unless they change nothing here (HARMLESS).

    Returns:
        ([1, T, H, D], None).

    Raises:
        ConfigurationError: the model asks for dropout, for another option, or for an unknown window.
    """
    shared = layout if isinstance(layout, SharedLayout) else None
    layouts = layout.whole if isinstance(layout, SharedLayout) else layout
    _check_options(options, dropout, sliding_window, layouts)
    if shared is None:
        return _attend(query, key, value, Scores(scaling, softcap, s_aux), layouts[sliding_window]), None
    query, key, value = (_to_heads(x, shared.group) for x in (query, key, value))
    sinks = None if s_aux is None else s_aux.view(_size(shared.group), -1)[shared.rank]
    output = _attend(query, key, value, Scores(scaling, softcap, sinks), layouts[sliding_window])
    return _to_tokens(output, shared.group), None


def _check_options(options: Mapping[str, Any], dropout: float, window: int | None, layouts: Layouts) -> None:
    unsupported = [name for name, value in options.items() if value is not None and name not in HARMLESS]
    unsupported += ["dropout"] * (dropout != 0) + [f"sliding_window={window}"] * (window not in layouts)
    if unsupported:
        raise ConfigurationError(
            f"MODEL_NAME: the model's attention has {', '.join(unsupported)}, which trees of tokens do not support; "
            "set LAYOUT=rows"
        )


def _attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores, layout: AttentionLayout | BlockMask) -> Tensor:
    """Return the attention [1, T, H, D]; see ``tree_attention``."""
    if not isinstance(layout, BlockMask):
        return _in_blocks(query, key, value, scores, layout)
    attend = partial(flex_attention, query, key, value, block_mask=layout, scale=scores.scale, enable_gqa=True)
    attend = partial(attend, kernel_options=kernel_options(query.shape[-1], query.dtype))
    if scores.cap is not None:
        attend = partial(attend, score_mod=scores.capped)
    if scores.sinks is None:
        return attend().transpose(1, 2)
    output, normalisers = attend(return_aux=AuxRequest(lse=True))
    return scores.of_sinks(output, normalisers.lse).transpose(1, 2)


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


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, scores: Scores, layout: AttentionLayout) -> Tensor:
    """Return the attention [1, T, H, D], computed block by block in float32; see ``tree_attention``.

    torch's attention for CPUs takes 30 times as long for the backward pass in bfloat16 as in float32.
    """
    q, k, v = (x[0].transpose(0, 1).float() for x in (query, key, value))
    outputs = []
    for block in layout.blocks:
        own_q, seen_k, seen_v = _heads(q, block.query_rows), _heads(k, block.key_rows), _heads(v, block.key_rows)
        if scores.cap is None and scores.sinks is None:
            output = scaled_dot_product_attention(
                own_q,
                seen_k,
                seen_v,
                attn_mask=block.mask,
                is_causal=block.is_causal,
                scale=scores.scale,
                enable_gqa=query.shape[1] > key.shape[1],
            )
        else:
            output = _by_scores(own_q, seen_k, seen_v, block, scores)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return rows_of(torch.cat(outputs), layout.unpack)[None].to(query.dtype)


MOST_SCORES = 2**23
"""Scores that exist at the same time on a CPU: 32 MB of each kind."""


def _by_scores(query: Tensor, key: Tensor, value: Tensor, block: Block, scores: Scores) -> Tensor:
    """Return a block's attention [R, H, Q, D], with scores that torch's attention has not; see ``Scores``.

    The backward pass computes the scores again, some runs or some queries of a run at a time.
    """
    heads, queries = query.shape[1:3]
    in_run = heads * key.shape[2]
    runs, own = max(1, MOST_SCORES // (in_run * queries)), max(1, MOST_SCORES // in_run)
    outputs = []
    for first in range(0, len(query), runs):
        at, parts = slice(first, first + runs), []
        for start in range(0, queries, own):
            rows, seen = slice(start, start + own), slice(start + own if block.is_causal else None)
            states = (query[at, :, rows], key[at, :, seen], value[at, :, seen], block.depths[at, rows])
            compute = partial(_of_scores, *states, block.window, scores)
            parts.append(checkpoint(compute, use_reentrant=False, preserve_rng_state=False))
        outputs.append(torch.cat(parts, 2))
    return torch.cat(outputs)


def _of_scores(query: Tensor, key: Tensor, value: Tensor, depths: Tensor, window: int | None, scores: Scores) -> Tensor:
    """Return the attention [R, H, Q, D] of queries at ``depths`` [R, Q], of keys [R, H_kv, K, D] and of values."""
    grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
    products = (grouped @ key.transpose(2, 3)).view(*query.shape[:3], -1)
    products = products * (query.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    products = products if scores.cap is None else scores.capped(products)
    products = products.masked_fill(hidden(depths, key.shape[2], window), -torch.inf)
    normalisers = products.logsumexp(3)
    weights = (products - normalisers[..., None]).exp()
    output = (weights.view(*grouped.shape[:3], -1) @ value).view(*query.shape[:3], -1)
    return output if scores.sinks is None else scores.of_sinks(output, normalisers)


def _heads(states: Tensor, rows: Tensor) -> Tensor:
    """Return the states [T, H, D] at ``rows`` [R, L] as [R, H, L, D]."""
    return rows_of(states, rows).transpose(1, 2)


AttentionInterface.register(TREE_ATTENTION, tree_attention)
