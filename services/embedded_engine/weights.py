"""The tensors of an architecture, read from a directory, and the checks of all tensors before anything changes."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

if TYPE_CHECKING:
    from services.embedded_engine.any_model import AnyArchitecture

_INDEX = "model.safetensors.index.json"


class WeightsError(Exception):
    """The weights do not fit the model; nothing was changed."""


TensorNames: TypeAlias = "Architecture | AnyArchitecture"
"""The names and shapes of a model's tensors and linear layers, by which weights and adapters are checked."""


class Architecture:
    """The shape of a decoder of the Llama, Qwen2 or Qwen3 family, or of Qwen3's with mixtures of experts."""

    def __init__(self, config: PretrainedConfig) -> None:
        """Read the shape from a configuration of which families.py says that it is known."""
        family = config.model_type
        bias = bool(getattr(config, "attention_bias", False))
        self.family: str = family
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.intermediate_size: int = config.intermediate_size
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads or config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.norm_eps: float = config.rms_norm_eps
        self.max_positions: int = config.max_position_embeddings
        self.has_tied_embeddings = bool(config.tie_word_embeddings)
        self.has_qkv_bias = bias or family == "qwen2"
        self.has_output_bias = bias and family != "qwen2"
        self.has_mlp_bias = bool(getattr(config, "mlp_bias", False))
        self.has_qk_norm = family in ("qwen3", "qwen3_moe")
        self.expert_layers: frozenset[int] = frozenset()
        """The layers that have a mixture of experts in place of a dense MLP."""
        if family == "qwen3_moe" and config.num_experts:
            # As transformers' Qwen3MoeDecoderLayer chooses them.
            mixed = (i for i in range(config.num_hidden_layers) if (i + 1) % config.decoder_sparse_step == 0)
            self.expert_layers = frozenset(mixed) - frozenset(config.mlp_only_layers or ())
            self.num_experts: int = config.num_experts
            self.experts_per_token: int = config.num_experts_per_tok
            self.expert_size: int = config.moe_intermediate_size
            self.normalises_experts = bool(config.norm_topk_prob)
            """The weights of a token's experts sum to 1."""

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor by its name in a Hugging Face model directory, tied tensors once."""
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

    @functools.cached_property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of every dense projection, by name."""
        weights = ((name.removesuffix(".weight"), shape) for name, shape in self.shapes.items())
        return {
            name: (shape[0], shape[1]) for name, shape in weights if name.endswith("_proj") and ".experts." not in name
        }

    def own_name(self, name: str) -> str:
        """Return the name in ``shapes`` or ``linear_layers`` of what a file calls ``name``: the same."""
        return name

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor of that name is allowed but not read: a tied copy, or a table that is computed."""
        return name.endswith("rotary_emb.inv_freq") or (self.has_tied_embeddings and name == "lm_head.weight")

    def _mlp_projections(self, layer: int) -> dict[str, tuple[int, int, bool]]:
        """Return outputs, inputs and whether there is a bias, by the name of each projection of a layer's MLP."""
        hidden, inner, has_bias = self.hidden_size, self.intermediate_size, self.has_mlp_bias
        prefixes = ["mlp."]
        projections: dict[str, tuple[int, int, bool]] = {}
        if layer in self.expert_layers:
            inner, has_bias = self.expert_size, False
            prefixes = [f"mlp.experts.{expert}." for expert in range(self.num_experts)]
            projections["mlp.gate"] = (self.num_experts, hidden, False)
        for prefix in prefixes:
            projections[f"{prefix}gate_proj"] = (inner, hidden, has_bias)
            projections[f"{prefix}up_proj"] = (inner, hidden, has_bias)
            projections[f"{prefix}down_proj"] = (hidden, inner, has_bias)
        return projections


def check(
    architecture: TensorNames, tensor_shapes: Mapping[str, tuple[int, ...]], source: str, *, is_complete: bool = True
) -> None:
    """Compare names and shapes of tensors with the model's.

    Raises:
        WeightsError: a tensor is unknown, has another shape or, if ``is_complete``, is missing; the message names the
            first few.
    """
    shapes = architecture.shapes
    found = {architecture.own_name(name): shape for name, shape in tensor_shapes.items()}
    problems = [f"{name} is missing" for name in shapes if is_complete and name not in found]
    for name, shape in found.items():
        if name in shapes and shape != shapes[name]:
            problems.append(f"{name} is {list(shape)} instead of {list(shapes[name])}")
        elif name not in shapes and not architecture.is_ignored(name):
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


def read_directory(directory: Path, architecture: TensorNames) -> dict[str, Tensor]:
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
            read = {n: file for n, file in places.items() if not architecture.is_ignored(architecture.own_name(n))}
            tensors = {name: file.get_tensor(name) for name, file in read.items()}
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
