"""The GPUs of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess

VISIBLE = "CUDA_VISIBLE_DEVICES"
QUERY_SECONDS = 30


def visible() -> tuple[str, ...]:
    """The indices of the GPUs that may be used: CUDA_VISIBLE_DEVICES if set, else all that nvidia-smi lists."""
    chosen = os.environ.get(VISIBLE)
    if chosen is not None:
        return tuple(listed(chosen))
    if shutil.which("nvidia-smi") is None:
        return ()
    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=QUERY_SECONDS,
        check=False,
    )
    # Without a working driver it fails, and there is no GPU to use.
    return tuple(found.stdout.split()) if found.returncode == 0 else ()


def listed(visible_devices: str) -> list[str]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES lists."""
    return [index.strip() for index in visible_devices.split(",") if index.strip()]
