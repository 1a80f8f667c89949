"""The GPUs of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess

QUERY_SECONDS = 30


def visible() -> tuple[str, ...]:
    """The indices of the GPUs that may be used: CUDA_VISIBLE_DEVICES if set, else all that nvidia-smi lists."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(index.strip() for index in chosen.split(",") if index.strip())
    if shutil.which("nvidia-smi") is None:
        return ()
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=QUERY_SECONDS,
        check=False,
    )
    # Without a working driver it fails, and there is no GPU to use.
    return tuple(listed.stdout.split()) if listed.returncode == 0 else ()
