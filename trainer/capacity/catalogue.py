"""Cards by their data sheets, and common models, whose shapes need no network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from services.core.errors import ConfigurationError, first_line
from trainer.capacity.shape import ModelShape


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
        return Model(name, ModelShape.of(config), text | text.get("text_config", {}))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"--model {model}: its config.json cannot be used ({first_line(error)}); give a name on the hub, a "
            f"directory with a config.json, or {', '.join(CONFIGS)}, whose shapes need no network"
        ) from error
