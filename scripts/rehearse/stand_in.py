"""A small model with random weights that stands in for a large one, whose tokenizer, templates and context it has."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, LlamaConfig, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from services.chat.tokenizers import load_tokenizer, tokenizer_digest
from services.core.errors import ConfigurationError, first_line
from services.core.files import remove_directory
from services.core.models import small_files
from services.embedded_engine.compute.weights import Architecture, WeightsError
from toys.models import random_model
from trainer.preflight.shape import ModelShape, count

MOST_PARAMETERS = 135_000_000
"""A model of this size or less stands in for itself, if its weights are here."""
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
"""The sizes of a mixture of experts."""


@dataclass(frozen=True)
class StandIn:
    """The directory of a stand-in, and the number of its parameters."""

    directory: Path
    parameters: int
    is_random: bool
    """False for a model that stands in for itself."""


def make(model: str, directory: Path) -> StandIn:
    """Write the stand-in of a model on the hub, or in a directory, to ``directory``, in place of an earlier one.

    The vocabulary, the special tokens, the templates, the generation settings and the context are the model's. No
    weights of the model are read or downloaded.

    Raises:
        ConfigurationError: the model's configuration or tokenizer cannot be loaded, or the tokenizer needs the model's
            own type, which the embedded engine does not compute. Or the model is in ``directory``.
    """
    source = small_files(model)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
        parameters = ModelShape.of(config).parameters
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"MODEL_NAME={model}: its config.json cannot be used ({first_line(error)}); give another model"
        ) from error
    if parameters <= MOST_PARAMETERS and any(source.glob("*.safetensors")):
        return StandIn(source.resolve(), parameters, is_random=False)
    if source.resolve() == directory.resolve():
        raise ConfigurationError(f"MODEL_NAME={model} is where --keep writes the stand-in; give another --keep")
    remove_directory(directory)
    disable_progress_bar()
    small = random_model(_small(config))
    small.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)  # made of config.json, which has the end tokens
    for path in source.iterdir():
        is_read = path.suffix in (".json", ".txt", ".model", ".jinja") and not path.name.endswith(".index.json")
        if is_read and path.name != "config.json":
            shutil.copyfile(path, directory / path.name)
    if tokenizer_digest(load_tokenizer(str(directory))) != tokenizer_digest(load_tokenizer(str(source))):
        raise ConfigurationError(
            f"MODEL_NAME={model}: its tokenizer depends on the model type {config.model_type!r}, which the embedded "
            "engine does not compute; it cannot be rehearsed"
        )
    return StandIn(directory, count(small), is_random=True)


def _small(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration with SIZES; as Llama's if the embedded engine does not compute the model's type."""
    try:
        Architecture.of(config)
    except (WeightsError, AttributeError):
        names = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        config = LlamaConfig(**{name: getattr(config, name, None) for name in names})
    changes: dict[str, Any] = SIZES | {name: size for name, size in EXPERTS.items() if hasattr(config, name)}
    changes |= {"tie_word_embeddings": True, "dtype": "float32"}
    if getattr(config, "layer_types", None):
        changes["layer_types"] = config.layer_types[: SIZES["num_hidden_layers"]]
    for name, value in changes.items():
        setattr(config, name, value)
    return config
