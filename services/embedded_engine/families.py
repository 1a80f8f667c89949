"""The families that the engine computes by a forward pass of its own (model.py); transformers computes all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.core.errors import ConfigurationError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def is_known(directory: Path) -> bool:
    """Return whether model.py computes a directory's model: no windows, SiLU, and rotations that do not change.

    It reads config.json itself, since an engine imports transformers in another way for a known family.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"MODEL_NAME: the configuration in {directory} cannot be read: {error}") from error
    rotation = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return (
        config.get("model_type") in FAMILIES
        and not config.get("use_sliding_window")
        and config.get("hidden_act", "silu") == "silu"
        and rotation.get("rope_type", rotation.get("type")) not in ("dynamic", "longrope")
    )
