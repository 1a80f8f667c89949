"""The writing of policy versions, on every rank: the policy's weights are gathered and written to the shared volume.

With LORA_RANK versions are adapters. Workers compute with them unmerged: merged weights would be rounded to the
published type, in which a trained change that is small compared with the weights mostly vanishes. Adapters keep all of
it, in about a hundredth of the bytes.

With PUBLISH_TRANSPORT=local the trainer shares a version's memory with the engines of its host. On processors rank 0
writes the version to a directory in memory, which all engines load as they load any model. On GPUs every rank has the
whole version on its own GPU in flattened buckets while it is published, and the engine's rank on the same GPU copies
them through a handle of CUDA IPC. Torch counts who still reads: what the trainer frees stays until every handle was
opened and closed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from services.core import machine
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.engines.engine import Delivery, Engine
from services.engines.proof import COMPARED, Evidence, remember
from services.engines.router import GPUS_LABEL, Worker
from services.engines.settings import EngineKind
from services.weights.broadcast_group import flattened
from services.weights.digests import published_digests
from services.weights.policy_store import FIRST_VERSION, PolicyStore
from services.weights.shared_tensors import pack_bucket
from trainer.config import PublishedType, TrainerSettings, Transport
from trainer.model.gathering import gather_state
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks
from trainer.model.rounding import MeasuredRounding, Rounding
from trainer.model.saving import DiskFullError, write_adapter, write_model, writing
from trainer.publishing.broadcast import make_buckets

log = get_logger(__name__)

VERSIONS_KEPT = 2
"""Versions kept on the shared volume besides those that a worker is loading. The older one serves a worker that looked
up the newest version just before a newer one appeared."""
PUBLISH_SECONDS = 600.0
"""Longest wait for a worker to take a version, for workers to come back, and for the volume to take a version. Even a
slow volume (0.3 GB/s) gives a worker a model of 70B parameters, 140 GB, in less."""
REMEDY = "set PUBLISH_TRANSPORT=broadcast or disk"

Save = Callable[[Path], object]
"""Fills a version's directory."""


class VersionWriter:
    """The writer of policy versions to the shared volume, on every rank."""

    def __init__(self, settings: TrainerSettings, policy: Policy, ranks: Ranks) -> None:
        """Make a writer, before a checkpoint is loaded into the policy."""
        self.settings = settings
        self.policy = policy
        self.ranks = ranks
        self.store = PolicyStore(settings.policy_dir)
        self.rounding = Rounding(getattr(torch, settings.publish_type))
        """The cast to PUBLISH_TYPE, in which nothing is lost: the policy has the weights that are published."""
        if settings.publish_type is PublishedType.BFLOAT16 and not settings.lora_rank:
            with policy.masters.in_place():
                policy.masters.rounding = MeasuredRounding(policy.masters.parameters.items())
        self.written: int | None = None
        """The version that was written last."""
        self.path = Path()
        """Its directory, from which workers load it."""
        self.metrics: dict[str, float] = {}
        """Its metrics."""
        rounding = policy.masters.rounding
        self.is_exact = not isinstance(rounding, MeasuredRounding) or rounding.is_exact
        """The first version has MODEL_NAME's weights to the bit; of this rank's."""
        self.evidence = Evidence()
        """The facts by which workers prove the versions; on rank 0."""
        self._hashing = ThreadPoolExecutor(1, "digests")
        self._digests: Future[None] = self._hashing.submit(lambda: None)
        """Resolved once the digests of the version that was written last are among the evidence."""
        self.state: dict[str, Tensor] = {}
        """Its tensors if they are sent to workers; on rank 0, until the workers have them."""
        is_local = settings.publish_transport is Transport.LOCAL
        self.on_gpus = GpuBuckets(ranks) if is_local and ranks.device.type == "cuda" else None
        """The newest version on the ranks' GPUs, with PUBLISH_TRANSPORT=local."""
        self.memory = HostMemory(settings.policy_dir) if is_local and self.on_gpus is None and ranks.is_main else None
        """The newest version in memory, with PUBLISH_TRANSPORT=local on processors; on rank 0."""
        self.is_sent = settings.publish_transport is not Transport.DISK and not settings.lora_rank
        """Versions are sent to the workers and written while the next steps train. Rank 0's value counts. Adapters are
        small, and no engine receives them through a process group: workers read them from the volume."""
        self._pool = ThreadPoolExecutor(1, "policy-writer")
        self._next: deque[tuple[int, Save]] = deque(maxlen=1)
        """The version that the thread writes next; a newer one takes its place."""
        self._writes: list[Future[None]] = []
        self._began_write = 0.0

    def write(self, version: int) -> None:
        """Write the version to the shared volume, where workers that start find it. A collective that needs no worker.

        A version that is sent to workers is written in a thread. If the thread is still writing an older one, this
        version waits for it, and the next call replaces this version if it still waits then. So at most two versions
        are in memory, the volume gets versions as fast as it takes them, and the newest always gets there in the end.

        Raises:
            DependencyLostError: the volume does not take it; raised on every rank.
            DiskFullError: the disk is full; raised on every rank.
            ConfigurationError: there is no room for shared memory; raised on every rank.
        """
        # Before another version is gathered, so that there are two in memory and not three.
        self._next.clear()
        self.wait_for_digests()
        # What is written at once is not copied on a CPU, because the parameters change only afterwards.
        gather = partial(gather_state, ranks=self.ranks, copy=self.is_sent and self.memory is None)
        if self.settings.lora_rank:
            state = gather(self.policy.adapter_parameters(self.rounding.dtype))
            save: Save = partial(write_adapter, self.policy, state)
        else:
            state = gather(self.policy.full_parameters(self.rounding))
            save = partial(write_model, self.policy, state, dtype=self.rounding.dtype)
        if self.on_gpus is not None:
            self.on_gpus.fill(state)
        put = partial(self._put, version, state, save)
        self.ranks.on_main(put, ConfigurationError, DiskFullError, DependencyLostError)
        self.written = version
        if isinstance(measured := self.policy.masters.rounding, MeasuredRounding):
            share = measured.share(self.ranks)
            self.metrics = {} if share is None else {"publish_share": share}
        # The version was gathered in memory that workers on the same machine and GPUs need for the new weights.
        if not machine.keeps_memory(self.settings.keep_memory):
            machine.release_memory()
        if self.settings.engine_sleeps:
            torch.cuda.empty_cache()

    def wait_for_digests(self) -> None:
        """Wait until the evidence has the digests of the version that was written last. On rank 0. No collective."""
        self._digests.result(PUBLISH_SECONDS)

    def release(self) -> None:
        """Give the GPU's memory of a published version back."""
        if self.on_gpus is not None:
            self.on_gpus.release()
            torch.cuda.empty_cache()

    def is_on_volume(self, version: int) -> bool:
        """Return True when a worker that starts or missed the version finds it, or will once it is written. On rank 0.

        No collective.
        """
        if not all(write.done() for write in self._writes):
            return True
        try:
            return self.store.path(version).is_dir()
        except OSError:
            return True  # The volume does not answer, so the version may still be there.

    def close(self) -> None:
        """Wait until the last version is on the volume. No collective."""
        try:
            self._check_writes(is_waiting=True)
        except DependencyLostError as error:
            # Not raised, because it would hide the reason why the run ended.
            log.warning("the last policy version is not on the volume", reason=str(error))
        self._pool.shutdown(wait=False)
        self._hashing.shutdown(wait=False)
        if self.memory is not None:
            self.memory.remove()

    def _put(self, version: int, state: dict[str, Tensor], save: Save) -> None:
        """Write a gathered version, now or in the thread; on rank 0."""
        # Out of the memory that the next version takes, the thread may still be writing the one before.
        self._check_writes(is_waiting=not self.is_sent or self.memory is not None)
        self.path = self.store.path(version)
        if not self.settings.lora_rank:
            self._digests = self._hashing.submit(self._hash, version, state)
        save = partial(self._save, version, save)
        if self.memory is not None:
            self.path = self.memory.write(version, save)
            save = partial(_copy_files, self.path)
        else:
            self.state = state if self.is_sent else {}
        if not self.is_sent:
            write_version(self.store, version, save)
            return
        with writing(self.store.policy_dir):
            self.store.mark(version)
        self._next.append((version, save))
        self._began_write = self._began_write if self._writes else time.monotonic()
        self._writes.append(self._pool.submit(self._write_next))

    def _hash(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Compute the digests of a version; in a thread, while it is written and sent."""
        if version == FIRST_VERSION:
            self.evidence.with_zeros = {name for name, tensor in state.items() if not tensor.all()}
        remember(self.evidence.digests, version, published_digests(state), COMPARED)

    def _save(self, version: int, save: Save, directory: Path) -> None:
        """Fill a version's directory, with the evidence for launchers."""
        save(directory)
        if not self.settings.lora_rank:
            self.wait_for_digests()
        self.evidence.write(version, directory)

    def _write_next(self) -> None:
        """Write the version that waits, unless an earlier call has written it; in the thread."""
        self._began_write = time.monotonic()
        try:
            version, save = self._next.pop()
        except IndexError:
            return
        write_version(self.store, version, save)

    def _check_writes(self, *, is_waiting: bool) -> None:
        """Raise the error of a write in the thread; wait for the end of all, or only look.

        Raises:
            DependencyLostError: the volume does not take a version, or not within PUBLISH_SECONDS.
            DiskFullError: the disk is full.
        """
        while self._writes:
            left = max(self._began_write + PUBLISH_SECONDS - time.monotonic(), 0.0)
            if not wait(self._writes[:1], left if is_waiting else 0.0).done:
                if left and not is_waiting:
                    return
                raise DependencyLostError(
                    f"a policy version is not written to {self.store.policy_dir} after {PUBLISH_SECONDS:g} s; "
                    "the volume is too slow or does not answer"
                )
            self._writes.pop(0).result()


def write_version(store: PolicyStore, version: int, save: Save) -> None:
    """Write a version with ``save``, make it visible, and delete old ones. A failed write leaves nothing.

    The oldest version is deleted before the new one is written: the file cache reuses its pages, which makes the write
    four times as fast. The newest version always stays.

    Raises:
        DiskFullError: the disk is full.
    """
    with writing(store.policy_dir):
        store.prune(max(VERSIONS_KEPT - 1, 1), PUBLISH_SECONDS)
        directory = store.begin(version)
        try:
            save(directory)
            store.commit(version)
        except Exception:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        store.prune(VERSIONS_KEPT, PUBLISH_SECONDS)


def _copy_files(source: Path, directory: Path) -> None:
    for file in source.iterdir():
        shutil.copy(file, directory)


class HostMemory:
    """The newest version in the memory of rank 0's host, as a model directory."""

    def __init__(self, policy_dir: Path) -> None:
        """Begin without a version; remove what a trainer of this run left that was killed."""
        machine.remove_memory(policy_dir)
        self._run = machine.memory_of_run(policy_dir).name
        self._directory: Path | None = None

    def write(self, version: int, save: Save) -> Path:
        """Have ``save`` write a version in place of the one before, whose pages it takes; return its directory.

        Raises:
            ConfigurationError: there is no room.
        """
        memory = machine.memory_directory()
        try:
            self.remove()
            # Of a new name, because others may have made a known one, and an engine that is late must find nothing.
            self._directory = Path(tempfile.mkdtemp(prefix=f"{self._run}-v{version:06d}-", dir=memory))
            save(self._directory)
        except (OSError, DiskFullError) as error:
            self.remove()
            raise ConfigurationError(
                f"PUBLISH_TRANSPORT=local: {memory} has no room for a policy version ({error}), "
                f"{shutil.disk_usage(memory).free / 1e9:.2f} GB are free; give it more (--shm-size of docker, a memory "
                "volume on Kubernetes), or set PUBLISH_TRANSPORT=disk"
            ) from error
        return self._directory

    def remove(self) -> None:
        """Remove the version."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


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
        self.handles: dict[str, list[str]] = {}
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
            packed.append(pack_bucket(flat, bucket))
        torch.cuda.synchronize()
        everyone = self.ranks.gather_json([_gpu_name(self.ranks.device), packed])
        if self.ranks.is_main:
            self.handles = dict(everyone)

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

    def _by_worker(self, workers: Sequence[Worker]) -> dict[str, list[list[str]]]:
        """Return the pickles of each bucket for the GPUs of each worker, by its URL."""
        taken: set[str] = set()
        found = {}
        for worker in workers:
            names = worker.metadata.get(GPUS_LABEL)
            if not names and worker.kind == EngineKind.SGLANG:
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
    listed = machine.listed_gpus(os.environ.get(machine.VISIBLE_GPUS_VARIABLE, ""))
    return listed[index] if listed else str(index)
