"""The models and cards that a job group can be planned for: their shapes and their memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from services.core.errors import ConfigurationError, first_line
from trainer.preflight.shape import ModelShape

WEIGHT_BYTES = 2
"""Size of a parameter in bfloat16, in an engine and when it is published."""
MEMORY = {
    name: gigabytes * 10**9
    for name, gigabytes in {
        "H100": 80,
        "H200": 141,
        "A100-80GB": 80,
        "B200": 180,
        "A100": 40,
        "L40S": 47,
        "L40": 47,
        "A40": 47,
        "L4": 23,
        "A10G": 23,
    }.items()
}
"""Bytes that programs see of a card, by SkyPilot's name for it; error correction takes some of what the card has."""

CONFIGS: dict[str, tuple[str, PretrainedConfig]] = {
    "0.5B": (
        "Qwen/Qwen2.5-0.5B-Instruct",
        Qwen2Config(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
    ),
    "1.5B": (
        "Qwen/Qwen2.5-1.5B-Instruct",
        Qwen2Config(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
    ),
    "7B": (
        "Qwen/Qwen2.5-7B-Instruct",
        Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        ),
    ),
    "Llama-8B": (
        "meta-llama/Llama-3.1-8B-Instruct",
        LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        ),
    ),
    "8B": (
        "Qwen/Qwen3-8B",
        Qwen3Config(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=False,
        ),
    ),
    "32B": (
        "Qwen/Qwen3-32B",
        Qwen3Config(
            vocab_size=151936,
            hidden_size=5120,
            intermediate_size=25600,
            num_hidden_layers=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=False,
        ),
    ),
    "70B": (
        "meta-llama/Llama-3.1-70B-Instruct",
        LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        ),
    ),
}
"""The name and the configuration of published models, by their label in docs/scaling.md."""


@dataclass(frozen=True)
class Model:
    """The dimensions of a model that decide over time and memory."""

    label: str
    name: str
    shape: ModelShape

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return self.shape.parameters

    @property
    def kv_bytes(self) -> float:
        """Size of the keys and values of a token."""
        return 2 * WEIGHT_BYTES * self.shape.layers * self.shape.kv_heads * self.shape.head_size


def find_model(given: str) -> Model:
    """Return a model by its name on the hub, its directory, or its label in docs/scaling.md (such as 8B).

    Raises:
        ConfigurationError: there is no such model, or its configuration is not a decoder's.
    """
    for label, (name, config) in CONFIGS.items():
        if given in (label, name):
            return Model(label, name, ModelShape.of(config))
    try:
        return Model(Path(given).name, given, ModelShape.of(config_of(given)))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"--model {given}: its config.json cannot be used ({first_line(error)}); give a name on the hub, a "
            f"directory with a config.json, or {', '.join(CONFIGS)}, whose shapes need no network"
        ) from error


@cache
def config_of(name: str) -> PretrainedConfig:
    """Return the configuration of a model by its name; the models of docs/scaling.md need no network."""
    known = dict(CONFIGS.values())
    config: PretrainedConfig = known[name] if name in known else AutoConfig.from_pretrained(name)
    return config
