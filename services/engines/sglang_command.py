"""The command of an SGLang server, and the packages that engines and router need."""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
import sys
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Self
from zipfile import BadZipFile, ZipFile

from services.core import machine
from services.core.child import API_KEY_FROM_TOKEN
from services.core.endpoints import Endpoint, exempt_from_proxies, node_rank, num_nodes
from services.core.errors import ConfigurationError
from services.core.files import read_signed, write_signed
from services.core.logs import get_logger
from services.core.machine import ComputeType
from services.core.processes import Command
from services.core.toolchain import check_tools, engine_variables, run_python
from services.engines.placement import EnginePlace
from services.engines.settings import RolloutSettings
from services.weights.policy_store import FIRST_VERSION

log = get_logger(__name__)

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

SGLANG_GRAPH_SEQUENCES = {20 * 2**30: 8, 35 * 2**30: 48, 60 * 2**30: 32, math.inf: 256}
"""Sequences up to which SGLang decodes by CUDA graphs of its own accord, for cards below a number of bytes. With a
tensor parallel size of 4 or more they are 160 or 512 on cards of 20 GiB or more."""
MOST_GRAPH_SEQUENCES = 1024
"""Sequences up to which a launcher asks for CUDA graphs."""
GRAPH_BYTES = 2 * 2**20
"""Bytes of a GPU that SGLang sets aside for the graphs of a sequence."""

ALLOW_UNBALANCED_MEMORY = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
"""Variable of engines that share GPUs with the trainer. Its ranks load at the same time as the engines, so that an
engine's GPUs have different amounts of free memory, for which SGLang would refuse to start."""

FLOAT32_HEAD, NO_FLOAT32_HEAD = "--enable-fp32-lm-head", "--no-enable-fp32-lm-head"
"""SGLang's flag, and a launcher's own one to leave it out, because SGLang has no flag for that."""


def sglang_command(settings: RolloutSettings, address: Endpoint, place: EnginePlace) -> Command:
    """Return the command of an SGLang server, which listens on ``address`` and sees the GPUs of its place only."""
    # Otherwise SGLang generates a token for each check of its /health, which takes a second.
    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    defaults = NCCL_VARIABLES | (ALLOW_UNBALANCED_MEMORY if settings.engine_sleeps else {})
    environment |= {name: value for name, value in defaults.items() if name not in os.environ}
    # SGLang's first requests go to its own server; a proxy stays for what it fetches from the hub.
    environment |= exempt_from_proxies(address.host)
    python = settings.sglang_python or sys.executable
    if place.devices:
        environment[machine.VISIBLE_GPUS_VARIABLE] = ",".join(place.devices)
        environment |= engine_variables(python)
    return Command(place.name, python, "sglang.launch_server", _flags(settings, address, place), environment)


def check_sglang_installed(python: str | None, *, on_gpus: bool) -> None:
    """Check that an interpreter, by default this one, has SGLang, and on GPUs what it compiles with.

    Raises:
        ConfigurationError: SGLang or a tool is not installed, or the interpreter cannot be run.
    """
    check_installed("sglang", "sglang", python)
    if on_gpus:
        check_tools(python or sys.executable, for_engine=True)


def check_installed(module: str, extra: str, python: str | None = None) -> None:
    """Check that an interpreter, by default this one, has ``module``, which ``extra`` installs.

    Raises:
        ConfigurationError: the module is not installed, or the interpreter cannot be run.
    """
    script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    is_installed = (
        importlib.util.find_spec(module) is not None if python is None else run_python(python, script).returncode == 0
    )
    if not is_installed:
        raise ConfigurationError(
            f"this node needs {module}, which {python or sys.executable} does not have; install the extra {extra!r} or "
            f"choose another ROLLOUT_ENGINE or SGLANG_PYTHON"
        )


def listen_flags(address: Endpoint) -> list[str]:
    """Return the flags with which engines, router and proxy listen on an address."""
    return ["--host", address.host, "--port", str(address.port)]


def _flags(settings: RolloutSettings, address: Endpoint, place: EnginePlace) -> list[str]:
    flags = ["--model-path", settings.model_name, *listen_flags(address)]
    flags += ["--weight-version", str(FIRST_VERSION), "--enable-metrics", API_KEY_FROM_TOKEN]
    flags += ["--tp-size", str(place.tensor_parallel)]
    flags += ["--max-queued-requests", str(MAX_QUEUED_REQUESTS)]
    # SGLang's own choice is float16 for some checkpoints, in which small changes of bfloat16 weights vanish.
    has_own = settings.engine_dtype is not ComputeType.AUTO
    flags += ["--dtype", (settings.engine_dtype if has_own else ComputeType.BFLOAT16).value]
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
        # Prefill graphs would keep the memory of 8,192 tokens' activations while the engine sleeps.
        flags += ["--enable-memory-saver", "--enable-weights-cpu-backup", "--disable-prefill-cuda-graph"]
    if settings.engine_deterministic:
        flags += ["--enable-deterministic-inference"]
    extra = shlex.split(settings.sglang_extra_flags)
    is_quantized = any(flag.split("=")[0] == "--quantization" for flag in extra)
    if place.devices and not is_quantized and NO_FLOAT32_HEAD not in extra:
        flags += [FLOAT32_HEAD]
    if place.devices:
        most, own = graph_sequences(settings, place.engines), own_graph_sequences(machine.gpu_memory())
        flags += ["--cuda-graph-max-bs-decode", str(most)] if most > own else []
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


def own_graph_sequences(memory: int | None) -> int:
    """Return the sequences for which SGLang has CUDA graphs of its own accord, by a GPU's bytes; 0 if not known."""
    return next((most for size, most in SGLANG_GRAPH_SEQUENCES.items() if memory < size), 0) if memory else 0


def graph_sequences(settings: RolloutSettings, engines: int) -> int:
    """Return the sequences of a step that an engine gets, limited by its settings; 0 if BATCH_SIZE is not known.

    Args:
        settings: the rollout node's settings.
        engines: engines of the node.
    """
    sequences = (settings.batch_size or 0) * settings.group_size
    share = -(-sequences // (num_nodes() * engines))
    return min(share, MOST_GRAPH_SEQUENCES, settings.engine_max_running_requests or MOST_GRAPH_SEQUENCES)


@dataclass(frozen=True)
class EngineKernels:
    """The kernels that the engines of a node have compiled, in a file of the run directory.

    SGLang keeps them in a directory of the node and compiles for minutes on a new pod. It would load them from the
    shared volume, too, where whoever can write could run code as the engine. So the launcher fills the directory from a
    file that is signed with JOBGROUP_TOKEN, and SGLang compares a kernel's sources with its own before it loads one.
    """

    file: Path
    token: str
    directory: Path

    @classmethod
    def of(cls, settings: RolloutSettings) -> Self | None:
        """Return the kernels of this node in a run; None without a JOBGROUP_TOKEN."""
        directory = Path(os.environ.get("SGLANG_JIT_CACHE_DIR") or "~/.cache/sglang/jit").expanduser()
        file = settings.run_dir / f"engine-kernels-{node_rank()}"
        return None if settings.token is None else cls(file, settings.token, directory)

    def load(self) -> None:
        """Add the file's kernels to the directory; warn if it cannot be used, because SGLang then compiles."""
        try:
            with ZipFile(BytesIO(read_signed(self.file, self.token))) as archive:
                # Another run's engine on this machine may have loaded a file that is there.
                new = [name for name in archive.namelist() if not (self.directory / name).exists()]
                archive.extractall(self.directory, new)
        except FileNotFoundError:
            return
        except (OSError, ValueError, BadZipFile) as error:
            log.warning("kept kernels not used; SGLang compiles again", file=str(self.file), reason=str(error))
        else:
            log.info("kernels of engines loaded", file=str(self.file), files=len(new))

    def keep(self) -> None:
        """Write all kernels of the directory; warn if they cannot be written. Builds in progress are left out."""
        content = BytesIO()
        try:
            with ZipFile(content, "w", strict_timestamps=False) as archive:
                for path in sorted(self.directory.glob("*/*/build-*/deps-*/*")):
                    archive.write(path, path.relative_to(self.directory))
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_signed(self.file, content.getvalue(), self.token)
        except OSError as error:
            log.warning("kernels not kept; a new pod compiles again", file=str(self.file), reason=str(error))
