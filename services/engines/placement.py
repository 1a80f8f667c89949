"""The engines of a rollout node: how many there are, and which GPUs each one has.

An engine takes the smallest tensor parallel size into which SGLang can split the model and at which the weights leave
room for keys and values. The node runs as many engines as its GPUs allow, because several engines generate more tokens
than one that is spread over all GPUs.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from services.core import machine
from services.core.endpoints import ENGINE_PORTS
from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.engines.settings import RolloutSettings
from services.engines.shape import Config, SizeFacts, can_split, read_config, weight_bytes

log = get_logger(__name__)

WEIGHTS_SHARE = 0.5
"""Largest share of a GPU's memory for weights. Keys and values, activations, CUDA graphs and incoming weights get the
rest."""


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
