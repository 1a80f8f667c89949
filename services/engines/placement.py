"""The engines of a rollout node: how many there are, which GPUs each one has, and the model's sizes that decide it.

An engine takes the smallest tensor parallel size into which SGLang can split the model and at which the weights leave
room for keys and values. The node runs as many engines as its GPUs allow, because several engines generate more tokens
than one that is spread over all GPUs. The trainer's capacity model (``trainer/capacity``) predicts the same placement
before a node is rented.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.core import machine
from services.core.endpoints import ENGINE_PORTS
from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.machine import ComputeType
from services.engines.settings import RolloutSettings

log = get_logger(__name__)
Config = dict[str, Any]
INDEX, ONE_FILE = "model.safetensors.index.json", "model.safetensors"
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

WEIGHTS_SHARE = 0.5
"""Largest share of a GPU's memory for weights. Keys and values, activations, CUDA graphs and incoming weights get the
rest."""


@dataclass(frozen=True)
class SizeFacts:
    """The facts that decide over the size of an engine; None where one is unknown."""

    config: Config | None
    weights: int | None
    """Bytes of the model's weights."""
    memory: int | None
    """Bytes of one GPU."""


@dataclass(frozen=True)
class EnginePlace:
    """The place of one engine on its node."""

    number: int = 0
    """Counts the node's engines from 0."""
    tensor_parallel: int = 1
    devices: tuple[str, ...] = ()
    """The engine's GPUs, as CUDA_VISIBLE_DEVICES lists them; empty without GPUs."""
    engines: int = 1
    """Engines of the node."""

    @property
    def name(self) -> str:
        """The engine's name in the launcher's log."""
        return f"engine-{self.number}"


@dataclass(frozen=True)
class Split:
    """The engines into which a node's GPUs are split."""

    engines: int
    tensor_parallel: int
    gpus_each: int


def place_engines(split: Split, n_gpus: int) -> list[EnginePlace]:
    """Return the places of a node's engines on its ``n_gpus`` GPUs."""
    listed = machine.listed_gpus(os.environ.get(machine.VISIBLE_GPUS_VARIABLE, ""))
    names, each = listed or list(map(str, range(n_gpus))), split.gpus_each
    return [
        EnginePlace(number, split.tensor_parallel, tuple(names[number * each : (number + 1) * each]), split.engines)
        for number in range(split.engines)
    ]


def split_node(settings: RolloutSettings, n_gpus: int, ask: Callable[[], SizeFacts]) -> Split:
    """Return the engines of a node with ``n_gpus`` GPUs; without GPUs, one.

    Args:
        settings: the rollout node's settings.
        n_gpus: GPUs of the node.
        ask: returns the sizes of model and GPUs.

    Raises:
        ConfigurationError: an engine needs more GPUs or memory than the node has, or a size of the settings does not
            divide them.
    """
    tensor, pipeline, data, _ = _parallel_sizes(settings)
    if not n_gpus:
        return Split(engines=1, tensor_parallel=tensor or 1, gpus_each=0)
    facts = ask()
    check_sizes(settings, n_gpus, facts.config)
    most = max(n_gpus // (pipeline * data), 1)
    tensor = tensor or _choose_tensor_parallel(settings.model_name, facts, most, pipeline)
    each = tensor * pipeline * data
    count = min(n_gpus // each, len(ENGINE_PORTS))
    if idle := n_gpus - count * each:
        log.warning("GPUs without an engine", idle=idle, engines=count, gpus_each=each)
    return Split(count, tensor, each)


def check_sizes(settings: RolloutSettings, n_gpus: int, config: Config | None) -> None:
    """Check that the parallel sizes of the settings divide a node's GPUs and the model's attention heads.

    Args:
        settings: the rollout node's settings.
        n_gpus: GPUs of the node, at least one.
        config: the model's configuration; None if it is unknown.

    Raises:
        ConfigurationError: a size does not; the message has those that do.
    """
    tensor, pipeline, data, splits_attention = _parallel_sizes(settings)
    others = pipeline * data
    heads = (config or {}).get("num_attention_heads") if splits_attention else None
    allowed = [n for n in range(1, n_gpus + 1) if n_gpus % (n * others) == 0 and (heads is None or heads % n == 0)]
    if others > n_gpus if tensor is None else tensor not in allowed:
        raise ConfigurationError(
            f"SGLANG_TP_SIZE is {tensor}, and SGLANG_EXTRA_FLAGS multiplies it by {others}, for the {n_gpus} GPUs of a "
            f"node and the {heads or 'unknown'} attention heads of {settings.model_name}; allowed are "
            f"{', '.join(map(str, allowed)) or 'none, so lower the other sizes'}"
        )


def size_facts(settings: RolloutSettings) -> SizeFacts:
    """Return the sizes from the model's files and from nvidia-smi."""
    config = read_config(settings.model_name)
    weights = None if config is None else weight_bytes(settings.model_name, config, settings.engine_dtype)
    return SizeFacts(config, weights, machine.gpu_memory())


def _choose_tensor_parallel(model: str, facts: SizeFacts, most: int, pipeline: int) -> int:
    """Return the smallest tensor parallel size that fits; the largest possible one if a size is unknown.

    Raises:
        ConfigurationError: the weights alone are larger than the node's GPUs.
    """
    if facts.config is None:
        log.warning("the tensor parallel size is the largest, for there is no config.json", model=model, size=most)
        return most
    possible = [size for size in range(1, most + 1) if can_split(facts.config, size)]
    weights, memory = facts.weights, facts.memory
    if weights is None or memory is None:
        size = possible[-1]
        log.warning("the tensor parallel size is the largest", weight_bytes=weights, gpu_bytes=memory, size=size)
        return size
    shares = {size: weights / (size * pipeline * memory) for size in possible}
    size = next((size for size in possible if shares[size] <= WEIGHTS_SHARE), possible[-1])
    if shares[size] >= 1:
        raise ConfigurationError(
            f"MODEL_NAME={model}: its weights take {weights / 2**30:.1f} GiB, and the largest possible "
            f"engine has {size * pipeline} GPUs of {memory / 2**30:.1f} GiB; take more or larger GPUs a node"
        )
    if shares[size] > WEIGHTS_SHARE:
        log.warning("little memory for keys and values", share_of_weights=round(shares[size], 2), size=size)
    return size


def _parallel_sizes(settings: RolloutSettings) -> tuple[int | None, int, int, bool]:
    """Return the tensor, pipeline and data parallel sizes of the settings, and whether attention's heads are split.

    SGLANG_EXTRA_FLAGS win over SGLANG_TP_SIZE; a tensor parallel size of None is chosen by the model's size. With
    data-parallel attention, the replicas share the GPUs of the tensor parallel group and do not split the heads.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=settings.sglang_tp_size)
    parser.add_argument("--pp-size", "--pipeline-parallel-size", "--pp", type=int, default=1)
    parser.add_argument("--dp-size", "--data-parallel-size", "--dp", type=int, default=1)
    parser.add_argument("--enable-dp-attention", action="store_true")
    try:
        flags, _ = parser.parse_known_args(shlex.split(settings.sglang_extra_flags))
    except argparse.ArgumentError as error:
        raise ConfigurationError(f"SGLANG_EXTRA_FLAGS is {settings.sglang_extra_flags!r}: {error}") from error
    data = 1 if flags.enable_dp_attention else flags.dp_size
    return flags.tp_size, flags.pp_size, data, not flags.enable_dp_attention


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
