"""Loads model directories into SGLang's own models: ``sglang-python load_published.py DIR...``.

Prints an object a directory: the class of the model, the names of its parameters that stay unfilled, those of the
directory's tensors that are in no parameter, and where each of the others is. Each is loaded twice, as an update of
weights does.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
from sglang.srt.distributed import bootstrap
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

NOT_NATIVE = {"exaone4", "gemma4", "gpt_oss"}
"""Models that refuse SGLang's attention for processors. They load with another one, and compute on GPUs only."""


class Built(NamedTuple):
    """SGLang's model of a directory's configuration, without its weights."""

    model: torch.nn.Module
    config: ModelConfig
    args: ServerArgs
    load: LoadConfig


def build(directory: Path, **options: Any) -> Built:
    """Return SGLang's model of a directory's configuration."""
    is_refused = json.loads((directory / "config.json").read_text())["model_type"] in NOT_NATIVE
    args = ServerArgs(
        str(directory),
        device="cpu",
        attention_backend="triton" if is_refused else "torch_native",
        dtype="float32",
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        **options,
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    config = ModelConfig.from_server_args(args)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=port)
    bootstrap.init_layer_runtime(model_config=config)
    initialize_moe_config()
    load = LoadConfig()
    with set_default_torch_dtype(torch.float32):
        model = _initialize_model(adjust_config_with_unaligned_cpu_tp(config, load, 1), load)
    return Built(model, config, args, load)


def outcome(directory: Path) -> dict[str, Any]:
    """Fill each tensor with a number of its own, and look for these numbers in SGLang's model."""
    model = build(directory).model
    shapes: dict[str, list[int]] = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    numbers = {name: 1 + place / 4096 for place, name in enumerate(shapes)}
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(math.nan)
        model.load_weights((name, torch.full(shape, numbers[name])) for name, shape in shapes.items())
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: x.detach().double() for name, x in state.items() if x.is_floating_point() and "_cache" not in name}
    # Mamba-2 layers keep -exp(A_log), and Gemma 1's norms 1 + weight; gpt-oss has its sinks in bfloat16.
    precision = {name: 2**-7 if name.endswith(".sinks") else 1e-5 for name in shapes}
    places = {
        name: [own for own, x in state.items() if min((x - v).abs().min() for v in (n, 1 + n, -math.exp(n))) < least]
        for (name, n), least in zip(numbers.items(), precision.values(), strict=True)
    }
    return {
        "class": type(model).__name__,
        "unfilled": [name for name, parameter in model.named_parameters() if parameter.isnan().any()],
        "skipped": [name for name in shapes if not places[name]],
        "places": places,
        "names": [*state],
    }


def show_each(outcome: Callable[..., dict[str, Any]], calls: Iterable[Sequence[str]]) -> None:
    """Print the outcome of each call, or SGLang's error; each has a process of its own."""

    def show(*paths: str) -> None:
        try:
            found = outcome(*map(Path, paths))
        except Exception as error:  # noqa: BLE001  # The outcome says what SGLang refuses.
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)

    logging.disable(logging.WARNING)
    ModelRegistry.get_supported_archs()  # imports all models, which takes longer than all loads
    for paths in calls:
        process = multiprocessing.get_context("fork").Process(target=show, args=paths)
        process.start()
        process.join()


if __name__ == "__main__":
    show_each(outcome, [(directory,) for directory in sys.argv[1:]])
