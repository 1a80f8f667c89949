"""The command of an SGLang server, and the packages that engines and router need."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys

from services.core import machine
from services.core.child import API_KEY_FROM_TOKEN
from services.core.endpoints import Endpoint, exempt_from_proxies, num_nodes
from services.core.errors import ConfigurationError
from services.core.machine import ComputeType
from services.core.processes import Command
from services.engines.placement import EnginePlace
from services.engines.settings import RolloutSettings
from services.weights.policy_store import FIRST_VERSION

MAX_QUEUED_REQUESTS = 4096
"""Requests that wait in SGLang before it answers 503; as many as wait in the embedded engine."""

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers that the trainer adapts, as SGLang calls them in Llama, Qwen2 and Qwen3."""

LORAS_PER_BATCH = 2
"""The trained adapter, and requests for the model alone, which count as one."""

NCCL_VARIABLES = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Variables of SGLang's processes unless the user has set them. When a broadcast breaks, torch ends an engine that
waits in it, because nothing else frees its GPU; without this variable it does so a minute later, after a dump that
nobody reads. TORCH_NCCL_ASYNC_ERROR_HANDLING=0 would leave the engine hanging until its launcher kills it after ten
minutes, and 2 would let it serve half-received weights as the new version."""

SGLANG_GRAPH_SEQUENCES, MOST_GRAPH_SEQUENCES = 256, 1024
"""Sequences up to which SGLang has CUDA graphs by itself (H100 and H200, tensor parallel size below 4), and up to which
it gets them here: each further one takes 2 MB."""

FLOAT32_HEAD, NO_FLOAT32_HEAD = "--enable-fp32-lm-head", "--no-enable-fp32-lm-head"
"""SGLang's flag, and a launcher's own one to leave it out, because SGLang has no flag for that."""


def sglang_command(settings: RolloutSettings, address: Endpoint, place: EnginePlace) -> Command:
    """Return the command of an SGLang server, which listens on ``address`` and sees the GPUs of its place only."""
    # Otherwise SGLang generates a token for each check of its /health, which takes a second.
    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    environment |= {name: value for name, value in NCCL_VARIABLES.items() if name not in os.environ}
    # SGLang's first requests go to its own server; a proxy stays for what it fetches from the hub.
    environment |= exempt_from_proxies(address.host)
    if place.devices:
        environment[machine.VISIBLE_GPUS_VARIABLE] = ",".join(place.devices)
    python = settings.sglang_python or sys.executable
    return Command(place.name, python, "sglang.launch_server", _flags(settings, address, place), environment)


def check_sglang_installed(python: str | None) -> None:
    """Check that an interpreter, by default this one, has SGLang.

    Raises:
        ConfigurationError: SGLang is not installed, or the interpreter cannot be run.
    """
    check_installed("sglang", "sglang", python)


def check_installed(module: str, extra: str, python: str | None = None) -> None:
    """Check that an interpreter, by default this one, has ``module``, which ``extra`` installs.

    Raises:
        ConfigurationError: the module is not installed, or the interpreter cannot be run.
    """
    is_installed = importlib.util.find_spec(module) is not None if python is None else _has_module(python, module)
    if not is_installed:
        raise ConfigurationError(
            f"this node needs {module}, which {python or sys.executable} does not have; install the extra {extra!r} or "
            f"choose another ROLLOUT_ENGINE or SGLANG_PYTHON"
        )


def _has_module(python: str, module: str) -> bool:
    check = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", check], timeout=60, check=False).returncode == 0
    except OSError as error:
        raise ConfigurationError(
            f"SGLANG_PYTHON is {python!r}, which cannot be run ({error}); give the path of a Python interpreter"
        ) from error


def listen_flags(address: Endpoint) -> list[str]:
    """Return the flags with which engines, router and proxy listen on an address."""
    return ["--host", address.host, "--port", str(address.port)]


def _flags(settings: RolloutSettings, address: Endpoint, place: EnginePlace) -> list[str]:
    flags = ["--model-path", settings.model_name, *listen_flags(address)]
    flags += ["--weight-version", str(FIRST_VERSION), "--enable-metrics", API_KEY_FROM_TOKEN]
    flags += ["--tp-size", str(place.tensor_parallel)]
    flags += ["--max-queued-requests", str(MAX_QUEUED_REQUESTS)]
    if settings.engine_dtype is not ComputeType.AUTO:
        flags += ["--dtype", settings.engine_dtype.value]
    for flag, value in (
        ("--context-length", settings.engine_context_length),
        ("--max-running-requests", settings.engine_max_running_requests),
        ("--max-total-tokens", settings.engine_max_total_tokens),
    ):
        if value is not None:
            flags += [flag, str(value)]
    if settings.lora_rank:
        flags += ["--enable-lora", "--max-lora-rank", str(settings.lora_rank)]
        flags += ["--lora-target-modules", *LORA_TARGETS, "--max-loras-per-batch", str(LORAS_PER_BATCH)]
    # The memory saver is for GPUs only; without it, SGLang's routes do the same and free nothing.
    if settings.engine_sleeps and place.devices:
        _check_allocator()
        flags += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    if settings.engine_deterministic:
        flags += ["--enable-deterministic-inference"]
    extra = shlex.split(settings.sglang_extra_flags)
    is_quantized = any(flag.split("=")[0] == "--quantization" for flag in extra)
    if place.devices and not is_quantized and NO_FLOAT32_HEAD not in extra:
        flags += [FLOAT32_HEAD]
    if place.devices and (most := _graph_sequences(settings, place)) > SGLANG_GRAPH_SEQUENCES:
        flags += ["--cuda-graph-max-bs-decode", str(most)]
    # Last, because the last of several values wins.
    return flags + [flag for flag in extra if flag != NO_FLOAT32_HEAD]


def _check_allocator() -> None:
    """Refuse expandable segments, whose memory SGLang's memory saver cannot give back while the engine sleeps."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            raise ConfigurationError(
                f"{name} has expandable_segments:True, with which an engine keeps its memory while it sleeps "
                "(ENGINE_SLEEPS); remove it from rollout-server's variables"
            )


def _graph_sequences(settings: RolloutSettings, place: EnginePlace) -> int:
    """Return the sequences of a step that an engine gets, limited by its settings; 0 if BATCH_SIZE is not known."""
    sequences = (settings.batch_size or 0) * settings.group_size
    share = -(-sequences // (num_nodes() * place.engines))
    return min(share, MOST_GRAPH_SEQUENCES, settings.engine_max_running_requests or MOST_GRAPH_SEQUENCES)
