"""The families that the engine computes by a forward pass of its own (model.py); transformers computes all others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.core.errors import ConfigurationError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of a model's config.json.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"MODEL_NAME: the configuration in {directory} cannot be read: {error}") from error
    return config


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether model.py computes the model of a config.json: no windows, SiLU, and rotations that do not change.

    It reads the file's own content, since an engine imports transformers in another way for a known family.
    """
    rotation = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return (
        config.get("model_type") in FAMILIES
        and not config.get("use_sliding_window")
        and config.get("hidden_act", "silu") == "silu"
        and rotation.get("rope_type", rotation.get("type")) not in ("dynamic", "longrope")
    )
