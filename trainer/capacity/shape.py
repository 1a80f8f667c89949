"""The numbers of a model that decide over memory, from its configuration alone; common models, and cards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from services.core.errors import ConfigurationError, first_line
from services.core.models import attention_option
from trainer.model.attention import obstacle_to_trees
from trainer.model.loading import count_parameters, decoder_layers
from trainer.model.recurrent import is_recurrent, mixes_by_states, without_kernels


@dataclass(frozen=True)
class ModelShape:
    """Dimensions and numbers of parameters of a decoder."""

    layers: int
    hidden: int
    intermediate: int
    """Width of the MLP; in a mixture, the sum over the experts that compute a token."""
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    token_experts: int
    """Experts that compute a token; 0 without a mixture of experts."""
    has_head_norms: bool
    """True when queries and keys are normalised, as in Qwen3."""
    parameters: int
    """All parameters; tied ones count once."""
    layer_parameters: int
    """Parameters of the largest layer; in most models all are equal."""
    root_parameters: int
    """Parameters outside the layers, which FSDP gathers once: embedding, last norm, head."""
    adapter_rank_parameters: int
    """Parameters of LoRA adapters of rank 1 on every linear layer but the output head."""
    is_bfloat16: bool
    """True when the checkpoint has bfloat16 numbers, by its configuration."""
    norms: int = 2
    """Norms of a layer's states; Gemma has one before and one after each part of a layer."""
    inner_states: int = 3
    """States of the MLP's width that a compiled layer keeps; with experts that have biases at most twice as many."""
    obstacle: str = ""
    """What keeps the model from being computed over trees of tokens; empty if nothing does."""
    recurrent_layers: int = 0
    mixer_bytes: int = 0
    """Bytes that autograd keeps of a token where a recurrent layer mixes tokens."""
    writes_scores: bool = False
    """True where attention in rows writes the score of every pair of tokens: transformers' eager one."""
    teachers: tuple[ModelShape, ...] = ()
    """Frozen models that a run keeps beside this one, which it trains."""

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, which may be tied to the embedding."""
        return self.vocabulary * self.hidden

    def has_heads_for(self, ranks: int) -> bool:
        """Return whether attention can be computed by so many ranks, equally many heads on each."""
        return self.heads % ranks == 0 and 0 in (self.kv_heads % ranks, ranks % self.kv_heads)

    @classmethod
    def of(cls, config: PretrainedConfig, *, trust_remote_code: bool = False) -> ModelShape:
        """Return the shape of a configuration's model, which is built without data.

        Raises:
            ConfigurationError: transformers has no causal language model for it.
        """
        try:
            with torch.device("meta"):
                options: dict[str, Any] = {"trust_remote_code": trust_remote_code, **attention_option(config)}
                model = AutoModelForCausalLM.from_config(config, **options)
        except ValueError as error:
            raise ConfigurationError(
                f"MODEL_NAME: transformers has no causal language model of type {config.model_type!r}; choose another"
            ) from error
        layers = decoder_layers(model.base_model)
        heads = config.num_attention_heads
        experts = getattr(config, "num_experts_per_tok", None) or getattr(config, "num_experts_per_token", None)
        linear = [part for part in model.base_model.modules() if isinstance(part, nn.Linear)]
        obstacle = obstacle_to_trees(config)
        # Families from before Llama do not all say it, and have four times the hidden size.
        width = _largest(config, "intermediate_size") or 4 * config.hidden_size
        recurrent = [layer for layer in layers if is_recurrent(config) and not obstacle and mixes_by_states(layer)]
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=experts * (getattr(config, "moe_intermediate_size", None) or width) if experts else width,
            heads=heads,
            kv_heads=_largest(config, "num_key_value_heads") or heads,
            head_size=_largest(config, "head_dim") or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            token_experts=experts or 0,
            has_head_norms=any(hasattr(getattr(layer, "self_attn", None), "q_norm") for layer in layers),
            parameters=count_parameters(model),
            layer_parameters=max(map(count_parameters, layers)),
            root_parameters=count_parameters(model) - sum(map(count_parameters, layers)),
            adapter_rank_parameters=sum(part.in_features + part.out_features for part in linear),
            is_bfloat16=config.dtype == torch.bfloat16,
            inner_states=6
            if any(getattr(p, "has_bias", False) for p in model.modules() if hasattr(p, "has_gate"))
            else 3,
            norms=max(2, *(sum(_is_norm(part, config.hidden_size) for part in layer.children()) for layer in layers)),
            obstacle=obstacle and f"{config.model_type} {obstacle}",
            recurrent_layers=len(recurrent),
            mixer_bytes=_mixer_bytes(recurrent[0], config.hidden_size) if recurrent else 0,
            writes_scores=model.config._attn_implementation == "eager",
        )


def _largest(config: PretrainedConfig, name: str) -> int:
    """Return the largest number that a layer has for an option, in which those of Gemma 4 differ; 0 for none."""
    return max(getattr(layer, name, None) or 0 for layer in getattr(config, "per_layer_config", None) or [config])


def _is_norm(module: nn.Module, width: int) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.shape == (width,)


def _mixer_bytes(layer: nn.Module, width: int) -> int:
    """Return the bytes that autograd keeps of a token in a recurrent layer's mixer, in float32.

    They are counted with transformers' functions in PyTorch, without data. Kernels keep less, in bfloat16 about half of
    it is kept. A branch of a tree keeps a state more, which is less than a hundredth for branches of 100 tokens.
    """
    mixer = next(part for part in layer.modules() if any(isinstance(child, nn.Conv1d) for child in part.children()))
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return x

    with torch.device("meta"), without_kernels(mixer), saved_tensors_hooks(keep, lambda x: x):
        output = mixer(torch.empty(1, COUNTED_TOKENS, width))  # until it is freed, no other tensor gets a place in kept
    for parameter in mixer.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    del output
    return sum(kept.values()) // COUNTED_TOKENS


COUNTED_TOKENS = 1024
"""Tokens of a count: whole chunks of every recurrence."""


@dataclass(frozen=True)
class Card:
    """A card by its data sheet."""

    memory: int
    """Bytes that programs see; error correction takes some of what the card has."""
    flops: float
    """Dense bfloat16 operations a second."""
    bandwidth: float
    """Bytes a second of the memory."""


_SHEETS = {
    "H100": (84, 989, 3.35), "H200": (149, 989, 4.8), "A100-80GB": (84, 312, 2.04), "B200": (190, 2250, 8.0),
    "A100": (42, 312, 1.555), "L40S": (47, 362, 0.864), "L40": (47, 181, 0.864), "A40": (47, 150, 0.696),
    "L4": (23, 121, 0.3), "A10G": (23, 70, 0.6),
}  # fmt: skip
"""Gigabytes, TFLOP/s and TB/s."""
CARDS = {name: Card(size * 10**9, flops * 1e12, speed * 1e12) for name, (size, flops, speed) in _SHEETS.items()}
"""The cards by SkyPilot's names for them."""

_DIMENSIONS = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
_TIED = {"dtype": "bfloat16", "tie_word_embeddings": True}
_UNTIED = _TIED | {"tie_word_embeddings": False}
_MODELS: dict[str, tuple[str, type[PretrainedConfig], tuple[int, ...], dict[str, Any]]] = {
    "0.5B": ("Qwen/Qwen2.5-0.5B-Instruct", Qwen2Config, (151936, 896, 4864, 24, 14, 2), _TIED),
    "1.5B": ("Qwen/Qwen2.5-1.5B-Instruct", Qwen2Config, (151936, 1536, 8960, 28, 12, 2), _TIED),
    "1.7B": ("Qwen/Qwen3-1.7B", Qwen3Config, (151936, 2048, 6144, 28, 16, 8), _TIED | {"head_dim": 128}),
    "7B": ("Qwen/Qwen2.5-7B-Instruct", Qwen2Config, (152064, 3584, 18944, 28, 28, 4), _UNTIED),
    "Llama-8B": ("meta-llama/Llama-3.1-8B-Instruct", LlamaConfig, (128256, 4096, 14336, 32, 32, 8), _UNTIED),
    "8B": ("Qwen/Qwen3-8B", Qwen3Config, (151936, 4096, 12288, 36, 32, 8), _UNTIED | {"head_dim": 128}),
    "32B": ("Qwen/Qwen3-32B", Qwen3Config, (151936, 5120, 25600, 64, 64, 8), _UNTIED | {"head_dim": 128}),
    "70B": ("meta-llama/Llama-3.1-70B-Instruct", LlamaConfig, (128256, 8192, 28672, 80, 64, 8), _UNTIED),
}
"""The name, the kind, the values of _DIMENSIONS and further options of each model, by its label."""
CONFIGS = {
    label: (name, kind(**dict(zip(_DIMENSIONS, sizes, strict=True)), **options))
    for label, (name, kind, sizes, options) in _MODELS.items()
}
"""The name and the configuration of published models, by label."""


class Model(NamedTuple):
    """A model by its name on the hub or its directory."""

    name: str
    shape: ModelShape
    config: dict[str, Any]


def find_model(model: str) -> Model:
    """Return a model by its name on the hub, its directory, or its label in CONFIGS (such as 8B).

    Raises:
        ConfigurationError: there is no such model, or its configuration is not a decoder's.
    """
    name = CONFIGS[model][0] if model in CONFIGS else model
    try:
        config = dict(CONFIGS.values()).get(name) or AutoConfig.from_pretrained(name)
        text = config.to_dict()
        return Model(name, ModelShape.of(config.get_text_config()), text | text.get("text_config", {}))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"--model {model}: its config.json cannot be used ({first_line(error)}); give a name on the hub, a "
            f"directory with a config.json, or {', '.join(CONFIGS)}, whose shapes need no network"
        ) from error
