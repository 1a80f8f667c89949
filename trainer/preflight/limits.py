"""The memory and the disk that this process may use."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from services.core.machine import host_memory

SHM = Path("/dev/shm")
ENGINE_ASLEEP = 3 * 2**29
"""Assumed bytes of a GPU that a sleeping SGLang keeps: CUDA's context, CUDA graphs, attention's workspace, adapters."""


@dataclass(frozen=True)
class Limits:
    """Bytes that are there; 0 where a place does not exist."""

    device: int
    """Memory of this rank's GPU; 0 on a CPU."""
    host: int
    """Memory of this node: the container's limit, or the machine's memory."""
    shm: int
    volume: int
    """Free space of the run directory's volume, and what this run holds of it already."""

    def smallest(self, others: Iterable[dict[str, int]]) -> Limits:
        """Return the least of each place, among ranks' limits as ``vars`` gives them."""
        everyone = [vars(self), *others]
        return Limits(**{name: min(limits[name] for limits in everyone) for name in vars(self)})


def find_limits(device: torch.device, run_dir: Path, *, is_shared: bool = False) -> Limits:
    """Return the limits of this process; on a GPU that ``is_shared``, less what a sleeping engine keeps."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    memory -= ENGINE_ASLEEP if memory and is_shared else 0
    there = next(parent for parent in (run_dir, *run_dir.parents) if parent.exists())
    own = sum(file.stat().st_size for file in _files(run_dir))
    return Limits(
        device=memory,
        host=host_memory(),
        shm=shutil.disk_usage(SHM).total if SHM.is_dir() else 0,
        volume=shutil.disk_usage(there).free + own,
    )


def _files(run_dir: Path) -> Iterable[Path]:
    """Yield the checkpoints' and versions' files of an earlier attempt of the run."""
    for name in ("checkpoints", "policy"):
        for file in (run_dir / name).rglob("*"):
            if file.is_file():
                yield file
