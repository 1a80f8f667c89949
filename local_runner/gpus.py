"""The GPUs of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess

VISIBLE = "CUDA_VISIBLE_DEVICES"
QUERY_SECONDS = 30


def visible() -> tuple[str, ...]:
    """Return the indices of the usable GPUs: those of CUDA_VISIBLE_DEVICES if set, else all that nvidia-smi lists."""
    if VISIBLE in os.environ:
        return tuple(listed(os.environ[VISIBLE]))
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    # It fails without a working driver, and then there is no GPU to use.
    return tuple(found.stdout.split()) if found.returncode == 0 else ()


def listed(visible_devices: str) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES lists."""
    return [index.strip() for index in visible_devices.split(",") if index.strip()]
