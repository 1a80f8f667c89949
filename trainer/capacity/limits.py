"""The bytes that a run has: of its GPUs, its nodes and the volume of its run directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from services.core.machine import host_memory, memory_directory
from trainer.capacity.need import ENGINE_ASLEEP


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
    disk = shutil.disk_usage(next(parent for parent in (run_dir, *run_dir.parents) if parent.exists()))
    volume = disk.free + _size(run_dir, "checkpoints", "policy", "groups")
    return Limits(memory, host_memory(), shutil.disk_usage(memory_directory()).total, volume)


def _size(run_dir: Path, *names: str) -> int:
    """Return the bytes of the files below directories of a run, such as those of an earlier attempt."""
    return sum(file.stat().st_size for name in names for file in (run_dir / name).rglob("*") if file.is_file())


@dataclass(frozen=True)
class VolumeRoom:
    """The room on the volume, of which the checkpoints, versions and model of the run need ``needed`` bytes."""

    run_dir: Path
    needed: int

    def holds(self, size: int) -> bool:
        """Return whether there is room for a file of ``size`` bytes."""
        left = shutil.disk_usage(self.run_dir).free - size
        return left >= self.needed or left + _size(self.run_dir, "checkpoints", "policy", "model") >= self.needed
