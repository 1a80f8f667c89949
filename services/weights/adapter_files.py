"""LoRA adapters as files: PEFT's configuration and tensors in a directory, which PEFT and every engine load."""

from __future__ import annotations

from pathlib import Path

ADAPTER_NAME = "policy"
"""The name of the trained adapter on every rollout worker; a request gives it as ``lora_path``."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def is_adapter(directory: Path) -> bool:
    """Return whether a directory has a LoRA adapter and not a whole model."""
    return (directory / CONFIG_FILE).is_file()
