"""Versions in memory that the trainer shares with the engines of its host (PUBLISH_TRANSPORT=local).

On processors rank 0 writes a version to a directory in memory, which all engines load as they load any model. On GPUs
every rank has the whole version on its own GPU in flattened buckets while it is published, and the engine's rank on the
same GPU copies them through a handle of CUDA IPC. Torch counts who still reads: what the trainer frees stays until
every handle was opened and closed.
"""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from services.core.endpoints import is_own_address
from services.core.errors import ConfigurationError
from services.core.machine import VISIBLE_GPUS_VARIABLE, listed_gpus, memory_directory, memory_of_run, remove_memory
from services.engines.engine import ROUTED, Delivery, Engine
from services.engines.router import ENGINE_LABEL, GPUS_LABEL, Worker
from services.engines.settings import EngineKind
from services.weights.broadcast_group import flattened
from services.weights.shared_tensors import pack_bucket
from trainer.model.ranks import Ranks
from trainer.model.saving import DiskFullError
from trainer.publishing.broadcast import make_buckets

REMEDY = "set PUBLISH_TRANSPORT=broadcast or disk"


class HostMemory:
    """The newest version in the memory of rank 0's host, as a model directory."""

    def __init__(self, policy_dir: Path) -> None:
        """Begin without a version; remove what a trainer of this run left that was killed."""
        remove_memory(policy_dir)
        self._run = memory_of_run(policy_dir).name
        self._directory: Path | None = None

    def write(self, version: int, save: Callable[[Path], object]) -> Path:
        """Have ``save`` write a version in place of the one before, whose pages it takes; return its directory.

        Raises:
            ConfigurationError: there is no room.
        """
        try:
            self.remove()
            # Of a new name, because others may have made a known one, and an engine that is late must find nothing.
            self._directory = Path(tempfile.mkdtemp(prefix=f"{self._run}-v{version:06d}-", dir=memory_directory()))
            save(self._directory)
        except (OSError, DiskFullError) as error:
            self.remove()
            raise ConfigurationError(
                f"PUBLISH_TRANSPORT=local: {memory_directory()} has no room for a policy version ({error}), "
                f"{shutil.disk_usage(memory_directory()).free / 1e9:.2f} GB are free; give it more (--shm-size of "
                "docker, a memory volume on Kubernetes), or set PUBLISH_TRANSPORT=disk"
            ) from error
        return self._directory

    def remove(self) -> None:
        """Remove the version."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def check_hosts(workers: Sequence[Worker]) -> None:
    """Check that every worker is on rank 0's host, whose memory it reads.

    Raises:
        ConfigurationError: one runs on another host.
    """
    for worker in workers:
        if not is_own_address(urlsplit(worker.url).hostname or ""):
            raise ConfigurationError(
                f"PUBLISH_TRANSPORT=local, but worker {worker.url} runs on another host than the trainer; {REMEDY}"
            )


class GpuBuckets:
    """The newest version on every rank's GPU, from ``fill`` to ``release``."""

    def __init__(self, ranks: Ranks) -> None:
        """Make empty buckets.

        Raises:
            ConfigurationError: the trainer has several nodes; raised on every rank.
        """
        if ranks.world_size != int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)):
            raise ConfigurationError(
                "PUBLISH_TRANSPORT=local, but ppo-trainer has several nodes, and GPUs share memory within one; set "
                f"num_nodes of ppo-trainer to 1, or {REMEDY}"
            )
        self.ranks = ranks
        self.handles: dict[str, list[bytes]] = {}
        """The pickle of each bucket by the GPU's name in CUDA_VISIBLE_DEVICES; on rank 0. Each is opened once."""
        self._flat: list[Tensor] = []

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Copy a version, which is on rank 0's host, to every GPU, and make the handles. A collective."""
        self.release()
        described = [[name, list(value.shape), str(value.dtype).split(".")[1]] for name, value in state.items()]
        shapes = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, shape, dtype in self.ranks.broadcast_json(described)
        }
        packed = []
        for bucket in make_buckets(shapes, has_first_alone=False):
            size = sum(value.nbytes for value in bucket.values())
            with fixed_segments():
                if self.ranks.is_main:
                    flat = flattened([state[name] for name in bucket], self.ranks.device)
                else:
                    flat = torch.empty(size, dtype=torch.uint8, device=self.ranks.device)
            if self.ranks.world_size > 1:
                dist.broadcast(flat, src=0)
            self._flat.append(flat)
            packed.append(base64.b64encode(pack_bucket(flat, bucket)).decode())
        torch.cuda.synchronize()
        everyone = self.ranks.gather_json([_gpu_name(self.ranks.device), packed])
        if self.ranks.is_main:
            self.handles = {gpu: [base64.b64decode(text) for text in texts] for gpu, texts in everyone}

    def release(self) -> None:
        """Give the memory back, except what an engine still reads."""
        self.handles = {}
        self._flat.clear()
        if self.ranks.device.type == "cuda":
            torch.cuda.ipc_collect()

    def delivery(self, version: int, workers: Sequence[Worker]) -> Delivery:
        """Return the version for these workers.

        Raises:
            ConfigurationError: a worker is on GPUs without a rank of the trainer, or on those of another worker, or
                spread over GPUs in more ways than by tensor parallelism.
        """
        buckets = self._by_worker(workers)

        async def load(engine: Engine) -> None:
            await engine.begin_update()
            *others, last = buckets[engine.url]
            for bucket in others:
                await engine.receive_shared(bucket, None)
            await engine.receive_shared(last, version)
            await engine.end_update()

        return Delivery(version, load)

    def _by_worker(self, workers: Sequence[Worker]) -> dict[str, list[list[bytes]]]:
        """Return the pickles of each bucket for the GPUs of each worker, by its URL."""
        taken: set[str] = set()
        found = {}
        for worker in workers:
            names = worker.metadata.get(GPUS_LABEL)
            if not names and worker.metadata.get(ENGINE_LABEL, ROUTED.kind) == EngineKind.SGLANG:
                raise ConfigurationError(
                    f"PUBLISH_TRANSPORT=local, but worker {worker.url} is SGLang with pipeline or data parallelism "
                    f"(SGLANG_EXTRA_FLAGS), or without a GPU, and takes no weights from the trainer's GPUs; {REMEDY}"
                )
            # The embedded engine takes the only GPU that it sees.
            gpus = str(names or next(iter(self.handles))).split(",")
            if not taken.isdisjoint(gpus) or not self.handles.keys() >= set(gpus):
                raise ConfigurationError(
                    f"PUBLISH_TRANSPORT=local, but worker {worker.url} runs on GPU {','.join(gpus)}; the ranks of "
                    f"ppo-trainer are on GPU {','.join(self.handles)}, and each shares its own with one engine. Give "
                    f"both tasks the same GPUs, or {REMEDY}"
                )
            taken.update(gpus)
            found[worker.url] = [list(bucket) for bucket in zip(*(self.handles[gpu] for gpu in gpus), strict=True)]
        return found


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Allocate memory of a GPU that other processes can open, within the block; torch shares no expandable segments."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    configured = next((os.environ[name] for name in names if name in os.environ), "")
    others = [part for part in configured.split(",") if part and not part.startswith("expandable_segments")]
    torch._C._accelerator_setAllocatorSettings(",".join([*others, "expandable_segments:False"]))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(configured)


def _gpu_name(device: torch.device) -> str:
    """Return a GPU's name in CUDA_VISIBLE_DEVICES, by which launchers call it, too."""
    index = device.index or 0
    listed = listed_gpus(os.environ.get(VISIBLE_GPUS_VARIABLE, ""))
    return listed[index] if listed else str(index)
