"""The tensors of an architecture, read from a directory, and the checks of all tensors before anything changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_INDEX = "model.safetensors.index.json"


class WeightsError(Exception):
    """The weights do not fit the model; nothing was changed."""


@dataclass(frozen=True)
class Experts:
    """The shape of the mixtures of experts that some layers have in place of a dense MLP."""

    count: int
    per_token: int
    """Experts that compute each token."""
    intermediate_size: int
    normalises: bool
    """The weights of a token's experts sum to 1."""
    layers: frozenset[int]
    """The layers that are mixtures."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> Experts | None:
        """Return the mixtures that a configuration describes, as transformers' Qwen3MoeDecoderLayer chooses them."""
        if config.model_type != "qwen3_moe" or not config.num_experts:
            return None
        layers = (i for i in range(config.num_hidden_layers) if (i + 1) % config.decoder_sparse_step == 0)
        return cls(
            count=config.num_experts,
            per_token=config.num_experts_per_tok,
            intermediate_size=config.moe_intermediate_size,
            normalises=bool(config.norm_topk_prob),
            layers=frozenset(layers) - frozenset(config.mlp_only_layers or ()),
        )


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder of the Llama, Qwen2 or Qwen3 family, or of Qwen3's with mixtures of experts."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    experts: Experts | None = None
    """The mixtures of experts; None for a model whose layers are all dense."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> Architecture:
        """Return the architecture that a configuration describes.

        Raises:
            WeightsError: the embedded engine does not compute this architecture.
        """
        family = config.model_type
        if family not in FAMILIES:
            raise WeightsError(f"model type {family!r}: the embedded engine computes {', '.join(FAMILIES)}")
        if getattr(config, "use_sliding_window", False) or config.hidden_act != "silu":
            raise WeightsError("the embedded engine computes neither sliding windows nor activations other than silu")
        bias = bool(getattr(config, "attention_bias", False))
        return cls(
            family=family,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            norm_eps=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
            has_tied_embeddings=bool(config.tie_word_embeddings),
            has_qkv_bias=bias or family == "qwen2",
            has_output_bias=bias and family != "qwen2",
            has_mlp_bias=bool(getattr(config, "mlp_bias", False)),
            has_qk_norm=family in ("qwen3", "qwen3_moe"),
            experts=Experts.of(config),
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by its name in a Hugging Face model directory, tied tensors once."""
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        attention = {
            "self_attn.q_proj": (queries, hidden, self.has_qkv_bias),
            "self_attn.k_proj": (keys, hidden, self.has_qkv_bias),
            "self_attn.v_proj": (keys, hidden, self.has_qkv_bias),
            "self_attn.o_proj": (hidden, queries, self.has_output_bias),
        }
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
            if self.has_qk_norm:
                shapes[f"{prefix}self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (self.head_dim,)
            for name, (outputs, inputs, has_bias) in (attention | self._mlp_projections(layer)).items():
                shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
                if has_bias:
                    shapes[f"{prefix}{name}.bias"] = (outputs,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.has_tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers

    def _mlp_projections(self, layer: int) -> dict[str, tuple[int, int, bool]]:
        """Return outputs, inputs and whether there is a bias, by the name of each projection of a layer's MLP."""
        hidden, inner, has_bias = self.hidden_size, self.intermediate_size, self.has_mlp_bias
        prefixes = ["mlp."]
        projections: dict[str, tuple[int, int, bool]] = {}
        if self.experts is not None and layer in self.experts.layers:
            inner, has_bias = self.experts.intermediate_size, False
            prefixes = [f"mlp.experts.{expert}." for expert in range(self.experts.count)]
            projections["mlp.gate"] = (self.experts.count, hidden, False)
        for prefix in prefixes:
            projections[f"{prefix}gate_proj"] = (inner, hidden, has_bias)
            projections[f"{prefix}up_proj"] = (inner, hidden, has_bias)
            projections[f"{prefix}down_proj"] = (hidden, inner, has_bias)
        return projections


def is_ignored(architecture: Architecture, name: str) -> bool:
    """Return whether a tensor of that name is allowed but not read: a tied copy, or a table that is computed."""
    return name.endswith("rotary_emb.inv_freq") or (architecture.has_tied_embeddings and name == "lm_head.weight")


def check(
    architecture: Architecture, tensor_shapes: Mapping[str, tuple[int, ...]], source: str, *, is_complete: bool = True
) -> None:
    """Compare names and shapes of tensors with the model's.

    Raises:
        WeightsError: a tensor is unknown, has another shape or, if ``is_complete``, is missing; the message names the
            first few.
    """
    shapes = architecture.shapes()
    problems = [f"{name} is missing" for name in shapes if is_complete and name not in tensor_shapes]
    for name, shape in tensor_shapes.items():
        if name in shapes and shape != shapes[name]:
            problems.append(f"{name} is {list(shape)} instead of {list(shapes[name])}")
        elif name not in shapes and not is_ignored(architecture, name):
            problems.append(f"{name} is not part of the model")
    refuse(source, problems)


def refuse(source: str, problems: Sequence[str]) -> None:
    """Raise WeightsError with the first few of the problems, if there are any."""
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise WeightsError(f"{source} does not fit the model: {'; '.join(problems[:3])}{more}")


def check_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Refuse weights with NaN or infinity, which would spoil every answer.

    Raises:
        WeightsError: a tensor has such values; the message names the first.
    """
    for name, tensor in tensors.items():
        # The sum is infinite or NaN if an element is.
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise WeightsError(f"{source}: {name} has values that are not finite; a training step went wrong")


def read_directory(directory: Path, architecture: Architecture) -> dict[str, Tensor]:
    """Return a model directory's tensors (one file or several, any float type), checked against the model.

    Raises:
        WeightsError: the directory does not exist, cannot be read, or does not fit.
    """
    source = str(directory)
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in _files(directory)]
            places = {name: file for file in files for name in file.keys()}  # noqa: SIM118  # not a mapping
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in places.items()}
            check(architecture, shapes, source)
            tensors = {n: file.get_tensor(n) for n, file in places.items() if not is_ignored(architecture, n)}
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{source} cannot be read: {error}") from error
    check_finite(tensors, source)
    return tensors


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise WeightsError(f"{directory} is not a directory; publish the version first, on a shared volume")
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise WeightsError(f"{index} is not an index of tensors: {error!r}") from error
        files = [directory / name for name in names]
    else:
        files = [directory / "model.safetensors"]
    absent = [path for path in files if not path.is_file()]
    if absent:
        raise WeightsError(f"{absent[0]} does not exist; weights are read from safetensors files only")
    return files
