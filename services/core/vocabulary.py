"""A model's files, vocabulary size and context length, for programs that do not load the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub

from services.core.errors import ConfigurationError


def vocabulary_size(model: str, named_by: str) -> int:
    """Return the vocabulary size from a model's config.json, without the seconds that importing transformers takes.

    Args:
        model: a Hugging Face name or a directory.
        named_by: the setting or option that names the model, for the error.

    Raises:
        ConfigurationError: the file cannot be read, or has no vocabulary size.
    """
    return _read(model, named_by, "vocab_size")


def context_length(model: str, named_by: str) -> int:
    """Return the longest prompt and completion together, in tokens; see ``vocabulary_size``."""
    return _read(model, named_by, "max_position_embeddings")


def model_file(model: str, name: str) -> Path:
    """Return the path of a file of a model: in its directory, or in the hub's cache, where it is downloaded.

    Raises:
        OSError, ValueError: the hub does not give it.
    """
    directory = Path(model).expanduser()
    return directory / name if directory.is_dir() else Path(huggingface_hub.hf_hub_download(model, name))


def _read(model: str, named_by: str, field: str) -> int:
    try:
        config: dict[str, Any] = json.loads(model_file(model, "config.json").read_text())
        # Multimodal models have a configuration for each modality.
        return int((config | (config.get("text_config") or {}))[field])
    except KeyError:
        reason = f"its config.json has no {field}"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    raise ConfigurationError(
        f"{named_by} {model!r}: its configuration cannot be loaded: {reason}; give a Hugging Face name or directory"
    )
