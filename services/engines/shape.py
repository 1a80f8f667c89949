"""The sizes of a model that decide over its engines' GPUs, from its configuration and without its weights.

The launcher places engines by them on its node, and the trainer's capacity model (``trainer/capacity``) predicts the
same placement before a node is rented.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.core.logs import get_logger
from services.core.machine import ComputeType

log = get_logger(__name__)

Config = dict[str, Any]

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class SizeFacts:
    """The facts that decide over the size of an engine; None where one is unknown."""

    config: Config | None
    weights: int | None
    """Bytes of the model's weights."""
    memory: int | None
    """Bytes of one GPU."""


def can_split(config: Config, size: int) -> bool:
    """Return whether SGLang 0.5.23 can split a model over ``size`` GPUs.

    Its models assert that ``size`` divides the attention heads, that of ``size`` and the key-value heads the smaller
    number divides the larger, that ``size`` divides the widths of the MLPs, and that there are as many experts.
    """
    heads = config.get("num_attention_heads")
    if heads is None:
        return size == 1
    key_values = config.get("num_key_value_heads") or heads
    widths = [config[name] for name in ("intermediate_size", "moe_intermediate_size") if config.get(name)]
    experts = config.get("num_experts") or config.get("num_local_experts") or size
    return (
        heads % size == 0
        and max(key_values, size) % min(key_values, size) == 0
        and all(width % size == 0 for width in widths)
        and experts >= size
    )


def read_config(model: str) -> Config | None:
    """Return the language model's part of a model's config.json; None if there is no such file."""
    config = _read_json(model, "config.json")
    return None if config is None else {**config, **config.get("text_config", {})}


def weight_bytes(model: str, config: Config, dtype: ComputeType) -> int | None:
    """Return the bytes of a model's weights in the type that SGLang computes in; None if their size is unknown.

    Args:
        model: a directory, or a model of the hub.
        config: from ``read_config``.
        dtype: ENGINE_DTYPE; ``auto`` is the stored type, but two bytes a number for float32.
    """
    stored_bytes = _stored_bytes(model)
    if stored_bytes is None or "quantization_config" in config:
        return stored_bytes
    stored = _BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    computed = _BYTES[dtype.value] if dtype is not ComputeType.AUTO else min(stored, 2)
    return stored_bytes * computed // stored


def _read_json(model: str, name: str) -> Config | None:
    from services.core.models import model_file

    try:
        text = model_file(model, name).read_text("utf-8")
    except (OSError, ValueError) as error:
        log.debug("no file of the model", model=model, file=name, reason=str(error))
        return None
    content: Config = json.loads(text)
    return content


def _stored_bytes(model: str) -> int | None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    index = _read_json(model, INDEX)
    if index is not None:
        size = index.get("metadata", {}).get("total_size")  # Some published indices lack it.
        return None if size is None else int(size)
    cached = Path(model) / ONE_FILE if Path(model).is_dir() else try_to_load_from_cache(model, ONE_FILE)
    try:
        if isinstance(cached, str | Path):
            return Path(cached).stat().st_size
        return get_hf_file_metadata(hf_hub_url(model, ONE_FILE)).size
    except (OSError, ValueError) as error:
        log.debug("size of the model not known", model=model, reason=str(error))
        return None
