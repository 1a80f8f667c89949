"""The machine that a process runs on: its GPUs, cores and memory, and the type of numbers to compute with on it.

Nothing here imports torch: nvidia-smi describes the GPUs, and ``decide_compute`` takes the abilities of the hardware as
arguments, so that every case can be tested on any machine.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal

from services.core.errors import ConfigurationError

NODE_RANK_VARIABLE = "SKYPILOT_NODE_RANK"
"""Set by SkyPilot on every node of every task."""
VISIBLE_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
PROMISED_GPUS_VARIABLE = "SKYPILOT_NUM_GPUS_PER_NODE"
"""Set by SkyPilot and the local runner on every node of every task."""
QUERY_SECONDS = 30
LIBRARIES_VARIABLE = "LD_LIBRARY_PATH"
DRIVER_LIBRARIES = Path("/usr/local/nvidia/lib64")
"""Where GKE mounts the driver's libraries, which no plain image looks into."""
INFINIBAND = Path("/dev/infiniband")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
# GKE mounts the driver's programs here and does not add the directory to PATH.
_PROGRAMS = os.pathsep.join(["/usr/local/nvidia/bin", "/usr/bin"])
_NCCL_SCRIPT = """
from importlib.metadata import distributions
packages = "nvidia-nccl-cu13", "nvidia-nccl-cu12"
print(*[each.version for name in packages for each in distributions(name=name)][:1])
"""


def visible_gpus() -> tuple[str, ...]:
    """Return the indices of the usable GPUs: those of CUDA_VISIBLE_DEVICES if set, else all that nvidia-smi lists."""
    if VISIBLE_GPUS_VARIABLE in os.environ:
        return tuple(listed_gpus(os.environ[VISIBLE_GPUS_VARIABLE]))
    return tuple(_query("index"))


def listed_gpus(visible_devices: str) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES lists."""
    return [index.strip() for index in visible_devices.split(",") if index.strip()]


def promised_gpus() -> int | None:
    """Return the number of GPUs that SkyPilot says this node has; None without SkyPilot.

    Raises:
        ConfigurationError: SKYPILOT_NUM_GPUS_PER_NODE is not a whole number.
    """
    return whole_number(PROMISED_GPUS_VARIABLE)


def whole_number(variable: str) -> int | None:
    """Return the value of an environment variable; None if it is not set.

    Raises:
        ConfigurationError: it is not a whole number.
    """
    text = os.environ.get(variable)
    if text is not None and not text.isdecimal():
        raise ConfigurationError(f"{variable} is {text!r}; allowed is a whole number")
    return None if text is None else int(text)


def gpu_memory() -> int | None:
    """Return the memory of this machine's smallest GPU in bytes; None without nvidia-smi."""
    sizes = [int(text) << 20 for text in _query("memory.total") if text.isdecimal()]
    return min(sizes, default=None)


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel driver, such as ``580.65.06``; None without a driver."""
    try:
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match[1] if match else next(iter(_query("driver_version")), None)


def check_cuda(devices: int, build: str | None) -> None:
    """Check that torch sees the GPUs that SkyPilot gave this node, so that nothing computes on a processor unnoticed.

    Args:
        devices: ``torch.cuda.device_count()``.
        build: ``torch.version.cuda``; None for a torch without CUDA.

    Raises:
        ConfigurationError: torch sees fewer; the message names driver and torch's CUDA.
    """
    promised = promised_gpus() or 0
    if devices >= promised:
        return
    visible, driver = os.environ.get(VISIBLE_GPUS_VARIABLE), driver_version() or "not found"
    raise ConfigurationError(
        f"{PROMISED_GPUS_VARIABLE} is {promised}, but torch sees {devices} CUDA devices ({VISIBLE_GPUS_VARIABLE} "
        f"{visible or 'not set'}, driver {driver}, torch built for {f'CUDA {build}' if build else 'processors only'}); "
        "docs/gpus.md says what fits together"
    )


def use_mounted_driver() -> None:
    """Start this program again with the driver's libraries on LD_LIBRARY_PATH, where GKE mounts them off the path.

    The loader reads the variable only when a program starts. Child processes inherit it.
    """
    paths = [path for path in os.environ.get(LIBRARIES_VARIABLE, "").split(os.pathsep) if path]
    if str(DRIVER_LIBRARIES) in paths or not (DRIVER_LIBRARIES / "libcuda.so.1").exists():
        return
    environment = os.environ | {LIBRARIES_VARIABLE: os.pathsep.join([*paths, str(DRIVER_LIBRARIES)])}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


@cache
def installed_nccl(python: str | None = None) -> str | None:
    """Return the version of NCCL that pip installed for an interpreter, by default this one; None if it did not.

    NCCL joins processes only if these three numbers are equal in all of them. torch.cuda.nccl.version() would be the
    version that torch was compiled with.
    """
    line = [python or sys.executable, "-c", _NCCL_SCRIPT]
    found = subprocess.run(line, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    return ".".join(found.stdout.strip().split(".")[:3]) or None


def network_caution() -> str | None:
    """Return a warning that NCCL will use TCP on a node that has InfiniBand or RoCE; None elsewhere.

    NCCL loads libibverbs when it starts, and takes TCP without an error if the library is missing.
    """
    if not INFINIBAND.is_dir() or ctypes.util.find_library("ibverbs"):
        return None
    return (
        f"NCCL will use TCP between nodes: {INFINIBAND} is there, but libibverbs is not; install libibverbs1, "
        "ibverbs-providers and librdmacm1 in the image"
    )


def _query(field: str) -> list[str]:
    """Return a field of nvidia-smi, one text a GPU; nothing without a working driver."""
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=_PROGRAMS)
    if program is None:
        return []
    command = [program, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return reply.stdout.split() if reply.returncode == 0 else []


CORES_VARIABLE = "SKYPILOT_POD_CPU_CORE_LIMIT"
"""SkyPilot's variable with the cores that a pod asks for. The machine below a pod has more, which other pods use."""
THREADS_VARIABLE = "OMP_NUM_THREADS"
RAY_THREADS = "1"
"""The number of threads that Ray gives to every command of SkyPilot, for any number of cores."""


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    promised = os.environ.get(CORES_VARIABLE)
    return min(allowed, max(1, int(float(promised)))) if promised else allowed


def threads(*, processes: int = 1) -> int:
    """Return the number of threads that one process computes with: OMP_NUM_THREADS, else its share of the cores.

    On SkyPilot's nodes a value of 1 is Ray's and says nothing about the cores.

    Args:
        processes: processes of this node that compute at the same time and share the cores.
    """
    variable = os.environ.get(THREADS_VARIABLE)
    if variable and not (variable == RAY_THREADS and NODE_RANK_VARIABLE in os.environ):
        return int(variable)
    return max(1, cores() // processes)


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

CGROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The limit of a container's memory, by version of the kernel's interface."""
POD_MEMORY_VARIABLE = "SKYPILOT_POD_MEMORY_BYTES_LIMIT"
"""SkyPilot's variable with the bytes of the task's ``memory:``. They are the pod's request, and a limit only with
``set_pod_resource_limits``: a pod that takes more is evicted when its node runs short."""

KEPT_BLOCK_BYTES = 64 * 2**20
KEPT_BYTES = 2**31 - 1

KeepMemory = bool | Literal["auto"]
"""KEEP_MEMORY: whether a process keeps the memory that it freed for its next step or its next weights."""
MOST_KEPT = 1 / 6
"""Largest share of a node's memory that a process with KEEP_MEMORY=auto may have needed and still keeps. A laptop runs
four large processes: two ranks and two engines."""


def host_memory() -> int:
    """Return the bytes of memory of this machine or, where it is less, of this container or of the pod's request."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    texts = [file.read_text("utf-8").strip() for file in CGROUP_FILES if file.exists()]
    limits = [int(text) for text in (*texts, os.environ.get(POD_MEMORY_VARIABLE, "")) if text.isdecimal()]
    return min([whole, *filter(None, limits)])


def memory_directory() -> Path:
    """Return the directory whose files are in memory; without /dev/shm, as on macOS, that of temporary files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def memory_of_run(policy_dir: Path) -> Path:
    """Return the beginning of the path of what a run's trainer has in memory on this machine."""
    run = hashlib.blake2b(str(policy_dir.resolve()).encode(), digest_size=8).hexdigest()
    return memory_directory() / f"grpo-{run}"


def remove_memory(policy_dir: Path) -> None:
    """Remove what a run's trainer has left in memory on this machine, as far as this user may."""
    trainers = memory_of_run(policy_dir)
    for path in trainers.parent.glob(f"{trainers.name}*"):
        shutil.rmtree(path, ignore_errors=True)  # which leaves links alone


def keep_freed_memory() -> None:
    """Make the C library (glibc) keep freed memory until ``release_memory``, except blocks above KEPT_BLOCK_BYTES.

    Call this before starting threads: all threads then share one heap, while a running thread keeps its own.

    By default glibc returns large blocks at once, and the system clears each page of the next block, which took a
    quarter of the processor's time in training on a CPU. Larger blocks, such as an embedding, would leave large holes.
    """
    library = _c_library()
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def keeps_memory(setting: KeepMemory) -> bool:
    """Return whether this process keeps freed memory; with `auto` if its peak is a small share of the node's memory."""
    if setting != "auto":
        return setting
    unit = 1 if sys.platform == "darwin" else 1024
    keeps = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit <= MOST_KEPT * host_memory()
    _log_kept(keeps)
    return keeps


@cache
def _log_kept(keeps: bool) -> None:
    """Log the decision of KEEP_MEMORY=auto, once each."""
    # Here, because commands that never log start faster without it.
    from services.core.logs import get_logger

    text = f"KEEP_MEMORY=auto: this process {'keeps' if keeps else 'returns'} what it frees"
    get_logger(__name__).info(text, node_gb=round(host_memory() / 1e9, 1))


def release_memory() -> None:
    """Return free memory to the system, where the C library can (glibc).

    Tensors of very different sizes leave holes in the heap, which glibc never returns by itself: a gigabyte for a model
    of half a gigabyte. This takes milliseconds, so call it after a phase whose successor needs the memory.
    """
    library = _c_library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@cache
def _c_library() -> Any:
    """Return the C library with its functions as attributes; macOS and musl lack the functions used here."""
    return ctypes.CDLL(None)


class ComputeType(StrEnum):
    """The type of numbers that a model is computed in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Compute:
    """The hardware and the type of numbers that a model is computed with; logged as one line."""

    device: str
    compute_type: ComputeType
    """Never ``auto``; its value is the name of a torch dtype."""
    threads: int
    reason: str


def decide_compute(
    setting: str, wanted: ComputeType, *, device: str, multiplies_bfloat16: bool, threads: int
) -> Compute:
    """Return the hardware and the type of numbers to compute with.

    Args:
        setting: name of the setting, for ``reason``.
        wanted: value of the setting.
        device: ``cuda`` or ``cpu``.
        multiplies_bfloat16: whether the processor has bfloat16 instructions; see the function of that name.
        threads: processor threads that compute.
    """
    if wanted is not ComputeType.AUTO:
        return Compute(device, wanted, threads, f"{setting}={wanted}")
    if device == "cuda":
        return Compute(device, ComputeType.BFLOAT16, threads, f"{setting}=auto on a GPU")
    chosen = ComputeType.BFLOAT16 if multiplies_bfloat16 else ComputeType.FLOAT32
    instructions = "with" if multiplies_bfloat16 else "without"
    return Compute(device, chosen, threads, f"{setting}=auto on a processor {instructions} bfloat16 instructions")


def multiplies_bfloat16(capabilities: Mapping[str, Any]) -> bool:
    """Return whether a processor multiplies bfloat16 natively, from ``torch.cpu.get_capabilities()``."""
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
