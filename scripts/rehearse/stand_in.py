"""A small model with random weights that stands in for a large one, whose tokenizer, templates and context it has."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from services.core.errors import ConfigurationError, first_line
from services.core.files import remove_directory
from services.core.models import small_files
from services.embedded_engine.compute.weights import Architecture, WeightsError
from toys.models import random_model
from trainer.capacity.shape import ModelShape, count

MOST_PARAMETERS = 135_000_000
"""A model of this size or less stands in for itself, if its weights are here."""
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
"""The sizes of a mixture of experts."""
LAYERS = 2


class StandIn(NamedTuple):
    """The directory of a stand-in, the number of its parameters, and whose weights it has."""

    directory: Path
    parameters: int
    weights: str


def make(model: str, directory: Path) -> StandIn:
    """Write the stand-in of a model on the hub, or in a directory, to ``directory``, in place of an earlier one.

    The architecture, the vocabulary, the special tokens, the templates, the generation settings and the context are the
    model's. No weights of the model are read or downloaded.

    Raises:
        ConfigurationError: the model's configuration cannot be loaded, or the embedded engine does not compute models
            of its type. Or the model is in ``directory``.
    """
    source = small_files(model)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
        parameters = ModelShape.of(config).parameters
        Architecture.of(config)
    except (OSError, ValueError, AttributeError, WeightsError) as error:
        raise ConfigurationError(
            f"MODEL_NAME={model}: the embedded engine cannot compute it ({first_line(error)}); rehearse another model"
        ) from error
    if parameters <= MOST_PARAMETERS and any(source.glob("*.safetensors")):
        return StandIn(source.resolve(), parameters, "its own weights")
    if source.resolve() == directory.resolve():
        raise ConfigurationError(f"MODEL_NAME={model} is where --keep writes the stand-in; give another --keep")
    sizes = SIZES | {name: size for name, size in EXPERTS.items() if hasattr(config, name)}
    sizes |= {"layer_types": config.layer_types[:LAYERS]} if getattr(config, "layer_types", None) else {}
    for name, value in (sizes | {"num_hidden_layers": LAYERS, "tie_word_embeddings": True, "dtype": "float32"}).items():
        setattr(config, name, value)
    remove_directory(directory)
    disable_progress_bar()
    small = random_model(config)
    small.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)  # made of config.json, which has the end tokens
    for path in source.iterdir():
        is_read = path.suffix in (".json", ".txt", ".model", ".jinja") and not path.name.endswith(".index.json")
        if is_read and path.name != "config.json":
            shutil.copyfile(path, directory / path.name)
    return StandIn(directory, count(small), "random weights")
