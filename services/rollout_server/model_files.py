"""The configuration and the size of a model, read from its directory or from the hub without loading its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.core.logs import get_logger
from services.core.machine import ComputeType

log = get_logger(__name__)

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

Config = dict[str, Any]


def read_config(model: str) -> Config | None:
    """Return the language model's part of a model's config.json; None if the file cannot be had."""
    config = _read_json(model, "config.json")
    return None if config is None else {**config, **config.get("text_config", {})}


def weight_bytes(model: str, config: Config, dtype: ComputeType) -> int | None:
    """Return the bytes of a model's weights in the type that SGLang computes in; None if their size is not known.

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


def _stored_bytes(model: str) -> int | None:
    index = _read_json(model, INDEX)
    if index is not None:
        size = index.get("metadata", {}).get("total_size")  # Some published indices lack it.
        return None if size is None else int(size)
    path = Path(model) / ONE_FILE
    if path.is_file():
        return path.stat().st_size
    return None if Path(model).is_dir() else _size_on_hub(model)


def _read_json(model: str, name: str) -> Config | None:
    path = Path(model) / name if Path(model).is_dir() else _fetch(model, name)
    if path is None or not path.is_file():
        return None
    content: Config = json.loads(path.read_text())
    return content


def _fetch(model: str, name: str) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        return Path(hf_hub_download(model, name))
    except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        log.debug("no file of the model", model=model, file=name, reason=str(error))
        return None


def _size_on_hub(model: str) -> int | None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    cached = try_to_load_from_cache(model, ONE_FILE)
    if isinstance(cached, str):
        return Path(cached).stat().st_size
    try:
        return get_hf_file_metadata(hf_hub_url(model, ONE_FILE)).size
    except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        log.debug("size of the model not known", model=model, reason=str(error))
        return None
