"""The GPUs of this machine, asked without torch: their number, memory and driver."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from services.core.errors import ConfigurationError

VISIBLE = "CUDA_VISIBLE_DEVICES"
PROMISED = "SKYPILOT_NUM_GPUS_PER_NODE"
"""Set by SkyPilot and the local runner on every node of every task."""
GPUS_OF_A_NODE = 8
"""The most GPUs that a node on a cluster has."""
QUERY_SECONDS = 30
DRIVER_FILE = Path("/proc/driver/nvidia/version")
# GKE mounts the driver's programs here and does not add the directory to PATH.
_PROGRAMS = os.pathsep.join(["/usr/local/nvidia/bin", "/usr/bin"])


def visible() -> tuple[str, ...]:
    """Return the indices of the usable GPUs: those of CUDA_VISIBLE_DEVICES if set, else all that nvidia-smi lists."""
    if VISIBLE in os.environ:
        return tuple(listed(os.environ[VISIBLE]))
    return tuple(_query("index"))


def listed(visible_devices: str) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES lists."""
    return [index.strip() for index in visible_devices.split(",") if index.strip()]


def promised() -> int | None:
    """Return the number of GPUs that SkyPilot says this node has; None without SkyPilot.

    Raises:
        ConfigurationError: SKYPILOT_NUM_GPUS_PER_NODE is no whole number.
    """
    text = os.environ.get(PROMISED)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigurationError(f"{PROMISED} is {text!r}; allowed is a whole number")
    return int(text)


def memory_bytes() -> int | None:
    """Return the memory of this machine's smallest GPU in bytes; None if nvidia-smi does not tell."""
    sizes = [int(text) << 20 for text in _query("memory.total") if text.isdecimal()]
    return min(sizes, default=None)


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel driver, such as ``580.65.06``; None without a driver."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", DRIVER_FILE.read_text())
    except OSError:
        found = None
    return found[1] if found else next(iter(_query("driver_version")), None)


def check_cuda(devices: int, build: str | None) -> None:
    """Check that torch sees the GPUs that SkyPilot gave this node, so that nothing computes on a processor unnoticed.

    Args:
        devices: ``torch.cuda.device_count()``.
        build: ``torch.version.cuda``; None for a torch without CUDA.

    Raises:
        ConfigurationError: torch sees fewer; the message names driver, torch's CUDA and a remedy.
    """
    wanted = promised() or 0
    if devices >= wanted:
        return
    driver = driver_version()
    if build is None:
        remedy = "install a torch that is built for CUDA"
    elif os.environ.get(VISIBLE) is not None and len(listed(os.environ[VISIBLE])) < wanted:
        remedy = f"unset {VISIBLE}, which is {os.environ[VISIBLE]!r}"
    elif driver is None:
        remedy = (
            "install NVIDIA's driver on the node; on GKE also set LD_LIBRARY_PATH=/usr/local/nvidia/lib64, where the "
            "driver's libraries are mounted"
        )
    else:
        remedy = (
            f"take a node whose driver is new enough for CUDA {build} (CUDA 13 needs driver 580), or install a torch "
            "built for an older CUDA; on GKE set LD_LIBRARY_PATH=/usr/local/nvidia/lib64"
        )
    raise ConfigurationError(
        f"{PROMISED} is {wanted}, but torch sees {devices} CUDA devices (driver {driver or 'not found'}, torch built "
        f"for {f'CUDA {build}' if build else 'processors only'}); {remedy}"
    )


def _query(field: str) -> list[str]:
    """Return a field of nvidia-smi, one text a GPU; nothing without a working driver."""
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=_PROGRAMS)
    if program is None:
        return []
    command = [program, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return found.stdout.split() if found.returncode == 0 else []
