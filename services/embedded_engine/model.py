"""The transformer: prefill of packed prompts and decoding of a whole batch, in plain torch operations.

Decoders of the Llama, Qwen2 and Qwen3 families: RMSNorm, rotary positions, grouped-query attention, SwiGLU, mixtures of
experts. Projections of the same input are one product. Every operation computes a token from its own row only, in an
order that does not depend on the other rows, so that a sequence gets the same results whatever else runs.

Attention also gives a token the same result to the bit, however many tokens are computed with it. A prompt's keys and
values then equal those of the same tokens computed one by one, so a conversation can continue on what its completions
left in the cache. Two properties of matrix products stand in the way. Long sums are split by their length, so values
are summed CHUNK by CHUNK. And a product of one token's rows may be computed by another kernel than one of many tokens'
rows; where ``joins_rows`` finds that, each token of a prompt has a product of its own.

Shapes: N tokens or B sequences; H hidden size; Q query heads in K key-value heads of G = Q / K; D head dimension;
L keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig, modeling_rope_utils

from services.core.linear import Head, Linear, make_linear
from services.embedded_engine.adapters import Adapter, LayerAdapter, adapted
from services.embedded_engine.kv_cache import STEP, KeysValues, KVCache, round_up
from services.embedded_engine.weights import Architecture

CHUNK = 128
"""Values summed by one product."""
TOKENS = 64
"""Tokens of a prompt whose scores are computed at once."""


@dataclass(frozen=True)
class Mixture:
    """The weights of one layer's router and experts: each token is computed by the few experts that the router chooses.

    The router's logits are in the compute type and their softmax in float32, as in transformers and SGLang. A token's
    sum runs over its experts in ascending order, so that its result does not depend on the other tokens.
    """

    router: Linear
    experts: Sequence[tuple[Linear, Linear]]
    """The product of gate and up projection, and the down projection, of each expert."""
    per_token: int
    normalises: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, H] for x [N, H]."""
        weights, chosen = torch.softmax(self.router(x).float(), -1).topk(self.per_token)
        if self.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        result = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, places = torch.where(chosen == expert)
            gate_up, down = self.experts[expert]
            gate, up = gate_up(x[rows]).chunk(2, -1)
            result[rows] += down(functional.silu(gate) * up) * weights[rows, places, None]
        return result


StoreKeysValues = Callable[[int, int, Tensor, Tensor], None]
"""A function of layer, sequence, and the sequence's keys and values, each [K, tokens, D]."""


@dataclass(frozen=True)
class Layer:
    """The weights of one layer."""

    attention_norm: Tensor
    query_key_value: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    mlp: Mixture | tuple[Linear, Linear]
    """A mixture of experts; or the product of gate and up projection, and the down projection."""


@dataclass(frozen=True)
class Weights:
    """All weights of a model, ready to compute with."""

    embedding: Tensor
    layers: Sequence[Layer]
    norm: Tensor
    head: Linear
    parts: Mapping[tuple[str, ...], Tensor | Linear]
    """All of these but the head, each by the modules of a checkpoint that it is made of, in order."""


def pack_weights(
    architecture: Architecture, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Weights:
    """Return weights made of named tensors, which are removed from ``tensors`` one by one to save memory.

    All are copies, because a single view of a mapped file would keep the whole file in memory.
    """
    parts: dict[tuple[str, ...], Tensor | Linear] = {}

    def take(*names: str) -> Tensor:
        return torch.cat([tensors.pop(name).to(device=device, dtype=dtype) for name in names])

    def plain(module: str) -> Tensor:
        parts[module,] = taken = take(f"{module}.weight")
        return taken

    def linear(prefix: str, *names: str) -> Linear:
        modules = tuple(f"{prefix}{name}" for name in names)
        weight = take(*(f"{module}.weight" for module in modules))
        biases = [f"{module}.bias" for module in modules if f"{module}.bias" in tensors]
        parts[modules] = layer = make_linear(weight, take(*biases) if biases else None)
        return layer

    def mlp(prefix: str) -> tuple[Linear, Linear]:
        return linear(prefix, "gate_proj", "up_proj"), linear(prefix, "down_proj")

    def mixture(prefix: str) -> Mixture:
        experts = [mlp(f"{prefix}experts.{expert}.") for expert in range(architecture.num_experts)]
        gate = linear(prefix, "gate")
        return Mixture(gate, experts, architecture.experts_per_token, architecture.normalises_experts)

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}."
        return Layer(
            attention_norm=plain(f"{prefix}input_layernorm"),
            query_key_value=linear(f"{prefix}self_attn.", "q_proj", "k_proj", "v_proj"),
            query_norm=plain(f"{prefix}self_attn.q_norm") if architecture.has_qk_norm else None,
            key_norm=plain(f"{prefix}self_attn.k_norm") if architecture.has_qk_norm else None,
            output=linear(f"{prefix}self_attn.", "o_proj"),
            mlp_norm=plain(f"{prefix}post_attention_layernorm"),
            mlp=mixture(f"{prefix}mlp.") if index in architecture.expert_layers else mlp(f"{prefix}mlp."),
        )

    embedding = plain("model.embed_tokens")
    head = Head(embedding if architecture.has_tied_embeddings else take("lm_head.weight"))
    layers = [layer(index) for index in range(architecture.num_layers)]
    return Weights(embedding, layers, plain("model.norm"), head, parts)


class Model:
    """A decoder whose weights and LoRA adapter can be exchanged between calls."""

    def __init__(
        self,
        config: PretrainedConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        context_length: int,
    ) -> None:
        self.architecture = Architecture(config)
        self.weights = pack_weights(self.architecture, weights, dtype, device)
        self.adapter: Adapter | None = None
        self.dtype = dtype
        self.device = device
        self.context_length = context_length
        frequencies, scaling = _rotary_frequencies(config)
        angles = torch.arange(context_length, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        # By position, [length, 1, D]; the sines carry the sign of the rotation.
        self._cos = torch.cat([cos, cos], -1)[:, None].to(device, dtype)
        self._sin = torch.cat([-sin, sin], -1)[:, None].to(device, dtype)
        shape = self.architecture
        self._scale = shape.head_dim**-0.5
        self._joins_rows = joins_rows(shape.num_heads // shape.num_kv_heads, shape.head_dim, dtype, device)

    def pack(self, tensors: dict[str, Tensor]) -> Weights:
        """Return weights made of named tensors, which are removed from ``tensors``, for ``load``."""
        return pack_weights(self.architecture, tensors, self.dtype, self.device)

    def load(self, weights: Weights) -> None:
        """Replace the weights."""
        self.weights = weights

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the model computes with by its name in a model directory.

        A tied head is yielded as ``lm_head.weight`` only where it has other values than the embedding.
        """
        weights, shapes = self.weights, self.architecture.shapes
        for modules, part in weights.parts.items():
            weight, bias = (part, None) if isinstance(part, Tensor) else (part.weight, part.bias)
            for kind, whole in (("weight", weight), ("bias", bias)):
                if whole is not None:
                    names = [f"{module}.{kind}" for module in modules]
                    yield from zip(names, whole.split([shapes[name][0] for name in names]), strict=True)
        head = weights.head.weight
        if not self.architecture.has_tied_embeddings or not torch.equal(head, weights.embedding.to(head.dtype)):
            yield "lm_head.weight", head

    def prefill(
        self,
        sequences: Sequence[Sequence[int]],
        store: StoreKeysValues | None,
        use_adapter: Sequence[bool] = (),
        prefixes: Sequence[KeysValues | None] = (),
    ) -> Tensor:
        """Compute sequences from their first token on or from where their prefixes end, packed one after the other.

        Args:
            sequences: token ids without those of the prefixes.
            store: takes the keys and values, including the prefixes'; None where nothing will be generated.
            use_adapter: whether to compute each sequence with the LoRA adapter; empty: none of them.
            prefixes: keys and values of the tokens before each sequence, or None; empty: there are none.

        Returns:
            Hidden states [N, H] after the last norm, for ``logits``.
        """
        weights = self.weights
        parts = [prefix.parts if prefix is not None else [] for prefix in prefixes] or [[]] * len(sequences)
        before = [torch.cat(known, 3) if known else None for known in parts]
        starts = [0 if prefix is None else prefix.shape[3] for prefix in before]
        lengths = [len(sequence) for sequence in sequences]
        tokens = torch.tensor([token for sequence in sequences for token in sequence], device=self.device)
        spans = zip(starts, lengths, strict=True)
        positions = torch.cat([torch.arange(start, start + length, device=self.device) for start, length in spans])
        cos, sin = self._cos[positions], self._sin[positions]
        rows = self._adapted_rows(use_adapter, torch.tensor(lengths, device=self.device))
        x = weights.embedding[tokens].float()
        for index, (layer, adapter) in enumerate(zip(weights.layers, self._layer_adapters(), strict=True)):
            projected = self._project(layer, adapter, self._norm(x, layer.attention_norm), rows, cos, sin)
            attended = []
            for number, (query, key, value) in enumerate(
                zip(*(part.split(lengths) for part in projected), strict=True)
            ):
                prefix = before[number]
                keys, values = _whole(None if prefix is None else prefix[:, index], key, value)
                start, end = starts[number], starts[number] + lengths[number]
                attended.append(attend_causally(query, keys, values, start, self._scale, joins=self._joins_rows))
                if store is not None:
                    store(index, number, keys[:, :end], values[:, :end])
            x = x + adapted(layer.output, adapter.output, torch.cat(attended).flatten(1), rows)
            x = x + self._mlp(layer, adapter, x, rows)
        return self._norm(x, weights.norm)

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, longest: int, use_adapter: Sequence[bool] = ()
    ) -> Tensor:
        """Compute one more token of every running sequence.

        Args:
            tokens: the newest token of the sequence in each cache row from 0 on, [B].
            positions: the position of each token in its sequence, [B].
            cache: has the earlier tokens; keys and values of ``tokens`` are added.
            longest: the greatest position + 1.
            use_adapter: whether to compute each sequence with the LoRA adapter; empty: none of them.

        Returns:
            Logits [B, V] in float32.
        """
        weights, shape = self.weights, self.architecture
        batch, kv_heads = len(tokens), shape.num_kv_heads
        groups = shape.num_heads // kv_heads
        length = min(round_up(longest), cache.row_length)
        cos, sin = self._cos[positions], self._sin[positions]
        mask = causal_mask(positions, length, self.dtype)[:, None].expand(-1, kv_heads * groups, -1)
        mask = mask.reshape(batch * kv_heads, groups, length)
        # The places of the new keys in a layer's keys, viewed as [rows * K * row length, D].
        heads = torch.arange(batch * kv_heads, device=self.device)
        places = heads * cache.row_length + positions.repeat_interleave(kv_heads)
        rows = self._adapted_rows(use_adapter)
        x = weights.embedding[tokens].float()
        for index, (layer, adapter) in enumerate(zip(weights.layers, self._layer_adapters(), strict=True)):
            query, key, value = self._project(layer, adapter, self._norm(x, layer.attention_norm), rows, cos, sin)
            keys, values = cache.keys[index], cache.values[index]
            keys.view(-1, shape.head_dim).index_copy_(0, places, key.reshape(-1, shape.head_dim))
            values.view(-1, shape.head_dim).index_copy_(0, places, value.reshape(-1, shape.head_dim))
            grouped = query.reshape(batch * kv_heads, groups, shape.head_dim)
            seen_keys, seen_values = (side[:batch, :, :length].flatten(0, 1) for side in (keys, values))
            attended = attend(grouped, seen_keys, seen_values, mask, self._scale)
            x = x + adapted(layer.output, adapter.output, attended.view(batch, -1), rows)
            x = x + self._mlp(layer, adapter, x, rows)
        return self.logits(self._norm(x, weights.norm))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] in float32 of hidden states [N, H]."""
        return self.weights.head(hidden)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), weight.shape, weight.float(), self.architecture.norm_eps).to(self.dtype)

    def _layer_adapters(self) -> Adapter:
        return self.adapter or [LayerAdapter()] * self.architecture.num_layers

    def _adapted_rows(self, use_adapter: Sequence[bool], lengths: Tensor | None = None) -> Tensor | None:
        """Return which rows [N, 1] to compute with the adapter, one or ``lengths`` a sequence; None: no row."""
        if self.adapter is None or not any(use_adapter):
            return None
        rows = torch.tensor(use_adapter, device=self.device)[:, None]
        return rows if lengths is None else rows.repeat_interleave(lengths, 0)

    def _project(
        self, layer: Layer, adapter: LayerAdapter, x: Tensor, rows: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [N, Q, D], keys and values [N, K, D]; queries and keys are rotated to their positions."""
        shape = self.architecture
        projected = adapted(layer.query_key_value, adapter.query_key_value, x, rows)
        heads = projected.view(len(x), -1, shape.head_dim)
        rotated = heads[:, : shape.num_heads + shape.num_kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = self._norm(rotated[:, : shape.num_heads], layer.query_norm)
            rotated = torch.cat([queries, self._norm(rotated[:, shape.num_heads :], layer.key_norm)], 1)
        first, second = rotated.chunk(2, -1)
        rotated = torch.addcmul(rotated * cos, torch.cat([second, first], -1), sin)
        return rotated[:, : shape.num_heads], rotated[:, shape.num_heads :], heads[:, -shape.num_kv_heads :]

    def _mlp(self, layer: Layer, adapter: LayerAdapter, x: Tensor, rows: Tensor | None) -> Tensor:
        x = self._norm(x, layer.mlp_norm)
        if isinstance(layer.mlp, Mixture):
            return layer.mlp(x)
        gate_up, down = layer.mlp
        gate, up = adapted(gate_up, adapter.gate_up, x, rows).chunk(2, -1)
        return adapted(down, adapter.down, functional.silu(gate) * up, rows)


def _whole(prefix: Tensor | None, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [K, L, D] of a prefix [2, K, p, D] and n tokens after it [n, K, D], and zeros to L."""
    start = 0 if prefix is None else prefix.shape[2]
    end = start + len(key)
    whole = key.new_zeros(2, key.shape[1], round_up(end), key.shape[2])
    if prefix is not None:
        whole[:, :, :start] = prefix
    whole[0, :, start:end], whole[1, :, start:end] = key.transpose(0, 1), value.transpose(0, 1)
    return whole[0], whole[1]


def _rotary_frequencies(config: PretrainedConfig) -> tuple[Tensor, float]:
    """Return the angles per position [D / 2], float32, and the factor of cosines and sines.

    RoPE (arXiv:2104.09864) and its extensions, as transformers' models compute them; importing those takes seconds.
    """
    parameters: dict[str, Any] = config.rope_parameters
    kind = parameters["rope_type"]
    if kind == "default":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 1.0 / parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0
    # An engine's own process imports transformers as if torch were absent, so that this module lacks torch.
    modeling_rope_utils.torch = torch
    frequencies, scaling = modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), scaling


def causal_mask(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return a mask [..., length] of 0 at the places up to each of ``positions`` [...] and -inf after it."""
    return torch.where(torch.arange(length, device=positions.device) <= positions[..., None], 0.0, -torch.inf).to(dtype)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return softmax(scale * query keys^T + mask) values.

    Args:
        query: [B, M, D].
        keys: [B, L, D].
        values: [B, L, D], finite where masked.
        mask: [B, M, L].
        scale: factor of the scores.

    Returns:
        [B, M, D].
    """
    if keys.dtype is torch.bfloat16 and keys.device.type == "cpu":
        # oneDNN reads the transpose of contiguous keys as it is, but copies that of others number by number.
        keys = keys.contiguous()
    weights = torch.softmax(torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=scale), -1)
    if keys.shape[1] <= CHUNK:
        return torch.bmm(weights, values)
    total = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    for part, chunk in zip(weights.split(CHUNK, 2), values.split(CHUNK, 1), strict=True):
        total += torch.bmm(part, chunk)
    return total.to(query.dtype)


def attend_causally(query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, *, joins: bool) -> Tensor:
    """Return the attention [n, Q, D] of a sequence's tokens from ``start`` on to all tokens up to themselves.

    Args:
        query: [n, Q, D].
        keys: of the whole sequence, [K, L, D], L a multiple of STEP and at least ``start`` + n.
        values: [K, L, D].
        start: position of the first query.
        scale: factor of the scores.
        joins: whether tokens may share a product.
    """
    (count, num_queries, head_dim), kv_heads = query.shape, len(keys)
    groups = num_queries // kv_heads
    grouped = query.reshape(count, kv_heads, groups, head_dim).transpose(0, 1).contiguous()
    attended = torch.empty_like(grouped)
    for first in range(0, count, TOKENS):
        part = slice(first, min(first + TOKENS, count))
        length = round_up(start + part.stop)
        positions = torch.arange(start + first, start + part.stop, device=query.device)
        mask = causal_mask(positions, length, query.dtype)[:, None].expand(-1, groups, -1)
        seen_keys, seen_values = keys[:, :length], values[:, :length]
        if joins:
            rows = mask.flatten(0, 1).expand(kv_heads, -1, -1)
            result = attend(grouped[:, part].flatten(1, 2), seen_keys, seen_values, rows, scale)
            attended[:, part] = result.view_as(attended[:, part])
            continue
        for head in range(kv_heads):
            own_keys, own_values = (side[head].expand(len(positions), -1, -1) for side in (seen_keys, seen_values))
            attended[head, part] = attend(grouped[head, part], own_keys, own_values, mask, scale)
    return attended.transpose(0, 1).reshape(count, num_queries, head_dim)


def joins_rows(groups: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products of one token's rows and of many tokens' rows are equal to the bit on this processor."""
    if device.type != "cpu":
        # Other devices choose kernels by all sizes; there, a continued conversation is equal up to rounding.
        return True
    generator = torch.Generator().manual_seed(0)
    tokens, length = TOKENS + 1, 3 * CHUNK + STEP
    query = torch.randn(tokens, groups, head_dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, 1, length, head_dim, generator=generator).to(dtype)
    for start in (0, length - tokens):
        joined, apart = (
            attend_causally(query, keys, values, start, head_dim**-0.5, joins=joins) for joins in (True, False)
        )
        if not torch.equal(joined, apart):
            return False
    return True
