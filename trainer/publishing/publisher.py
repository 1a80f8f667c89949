"""The way of a policy version from the ranks to the rollout workers.

VersionWriter is on every rank: it gathers the policy's weights and writes them to the shared volume. Publisher is on
rank 0: it has every registered worker serve the version, and takes workers that do not serve it out of the routing.
Their launchers bring them up to date and register them again. The run waits for that only when fewer than MIN_WORKERS
workers are left.

With LORA_RANK versions are adapters. Workers compute with them unmerged: merged weights would be rounded to the
published type, in which a trained change that is small compared with the weights mostly vanishes. Adapters keep all of
it, in about a hundredth of the bytes.
"""

from __future__ import annotations

import asyncio
import pickle
import re
import shutil
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prometheus_client import Counter
from torch import Tensor

from services.core.endpoints import WEIGHTS_BROADCAST_PORT
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.core.machine import keeps_memory, release_memory
from services.core.tasks import ServiceThread, in_background
from services.engines.engine import Engine, Requests, WorkerRefusedError
from services.engines.router import RouterAdmin, Worker
from services.engines.versions import Directory, Form, serve
from services.weights.policy_store import PolicyStore
from services.weights.shared_tensors import FilePart, SharedMemory, pack_bucket
from trainer.config import PublishedType, TrainerSettings, Transport
from trainer.model.gathering import gather_state
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks
from trainer.model.rounding import MeasuredRounding, Rounding
from trainer.model.saving import DiskFullError, write_adapter, write_model, writing
from trainer.publishing.broadcast import MOST_UNFORMED, Broadcast, Broadcaster
from trainer.publishing.shared import GpuBuckets, SharedTensors, check_shares_memory, shared_memory

log = get_logger(__name__)

WORKERS_DROPPED = Counter("trainer_workers_dropped", "Rollout workers removed from the routing for a failed update.")

VERSIONS_KEPT = 2
"""Versions kept on the shared volume besides those that a worker is loading. The older one serves a worker that looked
up the newest version just before a newer one appeared."""
WRITES = 4
"""Most times that a version is written before its disappearance ends the run."""
PUBLISH_SECONDS = 600.0
"""Longest wait for a worker to take a version, and for workers to come back. Even a slow volume (0.3 GB/s) gives a
worker a model of 70B parameters, 140 GB, in less."""
ANSWER_SECONDS = 60.0
"""Longest wait for each answer of a worker that gives its memory away, or records a profile."""
POLL_SECONDS = 0.2
PROBE_SECONDS = 5.0
"""Longest wait for a worker to say which version it serves."""

IsThere = Callable[[], bool]
"""Returns True while the version that workers wait for is on the shared volume; called in a thread."""


class VersionGoneError(DependencyLostError):
    """The loss of the version that workers wait for from the shared volume."""


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
        self.metrics: dict[str, float] = {}
        """Its metrics."""
        self.state: dict[str, Tensor] = {}
        """Its tensors if they are sent to workers; on rank 0, until the workers have them."""
        self.part: FilePart | None = None
        """The place of ``state`` in shared memory; None if it is not there."""
        self.shares = settings.publish_transport is Transport.LOCAL
        self.on_gpus = GpuBuckets(ranks) if self.shares and ranks.device.type == "cuda" else None
        """The newest version on the ranks' GPUs, with PUBLISH_TRANSPORT=local."""
        self.is_sent = settings.publish_transport is not Transport.DISK
        """Versions are sent to the workers and written while the next steps train. Rank 0's value counts."""
        self._pool = ThreadPoolExecutor(1, "policy-writer")
        self._next: deque[tuple[int, Callable[[Path], None]]] = deque(maxlen=1)
        """The version that the thread writes next; a newer one takes its place."""
        self._memory: SharedMemory | None = None
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
        is_sent, rounding = self.is_sent, self.rounding
        # Before another version is gathered, so that there are two in memory and not three.
        self._next.clear()
        memory = self._memory_of_next()
        # What is written at once is not copied on a CPU, because the parameters change only afterwards.
        if self.settings.lora_rank:
            state = gather_state(self.policy.adapter_parameters(rounding.dtype), self.ranks, copy=is_sent)
            save = partial(write_adapter, self.policy, state)
        else:
            state = gather_state(self.policy.full_parameters(rounding), self.ranks, copy=is_sent, memory=memory)
            save = partial(write_model, self.policy, state, dtype=rounding.dtype)
        if self.on_gpus is not None:
            self.on_gpus.fill(state)

        def write() -> None:
            self.state = state if is_sent else {}
            self.part = None if memory is None else memory.finish(version)
            if is_sent and not self.settings.lora_rank:
                self._write_later(version, save)
                return
            self._check_writes(is_waiting=True)
            write_version(self.store, version, save)

        self.ranks.on_main(write, DiskFullError, DependencyLostError)
        self.written = version
        if isinstance(measured := self.policy.masters.rounding, MeasuredRounding):
            share = measured.share(self.ranks)
            self.metrics = {} if share is None else {"publish_share": share}
        # The version was gathered in memory that workers on the same machine and GPUs need for the new weights.
        if not keeps_memory(self.settings.keep_memory):
            release_memory()
        if self.settings.engine_sleeps:
            torch.cuda.empty_cache()

    def buckets(self, workers: Sequence[Worker], state: dict[str, Tensor]) -> dict[str, list[list[bytes]]]:
        """Return the pickles that tell each worker where the newest version is in shared memory; see SharedTensors.

        Raises:
            ConfigurationError: a worker is on other GPUs than the trainer.
        """
        if self.on_gpus is not None:
            return self.on_gpus.by_worker(workers)
        assert self.part is not None, "a version was written"
        return {worker.url: [[pack_bucket(self.part, state)]] for worker in workers}

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
        if self._memory is not None:
            self._memory.remove()

    def _memory_of_next(self) -> SharedMemory | None:
        """Return shared memory for the next version, with PUBLISH_TRANSPORT=local on rank 0 of processors.

        The thread writes the version before from the same memory, so this waits for it.

        Raises:
            ConfigurationError, DependencyLostError, DiskFullError: see ``write``; raised on every rank.
        """
        if not self.shares or self.on_gpus is not None:
            return None

        def take() -> None:
            self._check_writes(is_waiting=True)
            if self._memory is None:
                self._memory = shared_memory(self.settings, self.policy, self.rounding.dtype)
            self._memory.begin()

        self.ranks.on_main(take, ConfigurationError, DiskFullError, DependencyLostError)
        return self._memory

    def _write_later(self, version: int, save: Callable[[Path], None]) -> None:
        """Have the thread write a version, in place of one that still waits."""
        self._check_writes(is_waiting=False)
        with writing(self.store.policy_dir):
            self.store.mark(version)
        self._next.append((version, save))
        self._began_write = self._began_write if self._writes else time.monotonic()
        self._writes.append(self._pool.submit(self._write_next))

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


def write_version(store: PolicyStore, version: int, save: Callable[[Path], None]) -> None:
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


class Publisher:
    """Has the rollout workers serve policy versions; on rank 0."""

    def __init__(
        self,
        settings: TrainerSettings,
        services: ServiceThread,
        writer: VersionWriter,
        write: Callable[[int], None] | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Make a publisher.

        Args:
            settings: MIN_WORKERS, the transport, the token.
            services: runs the requests to router and workers.
            writer: the writer of this rank.
            write: has the writers of all ranks write a version; without it there is one rank.
            release: has the writers of all ranks give the GPUs' memory of a version back; likewise.
        """
        self.settings = settings
        self.services = services
        self.writer = writer
        self._write = write or writer.write
        self._release = release or writer.release
        is_broadcast = settings.publish_transport is Transport.BROADCAST and not settings.lora_rank
        self.broadcaster = Broadcaster(settings, writer.ranks.device, PUBLISH_SECONDS) if is_broadcast else None
        self.refusal = ""
        """The reason why the run has given broadcasts up; empty while it has not."""

    def publish(self, version: int) -> dict[str, float]:
        """Have the workers serve ``version``; write it first, unless it was the last version written.

        Returns:
            Seconds and counts by metric name.

        Raises:
            DependencyLostError: fewer than MIN_WORKERS workers serve the version.
            DiskFullError: the version cannot be written.
            InterruptedCallError: the run was asked to stop.
        """
        writes = 0
        while True:
            if self.writer.written != version:
                self._write(version)
            try:
                metrics = self.services.call(self._deliver(version), interruptible=True)
                if self.writer.on_gpus is not None:
                    self._release()
                return self.writer.metrics | metrics
            except VersionGoneError as error:
                writes += 1
                if writes == WRITES:
                    raise
                log.warning("policy version is written again", policy_version=version, reason=str(error))
                self.writer.written = None

    def keep_on_volume(self) -> None:
        """Write the newest version again if the volume has lost it, because a worker that comes back waits for it."""
        version = self.writer.written
        if version is not None and not self.writer.is_on_volume(version):
            log.warning("policy version is written again", policy_version=version, reason="it has gone from the volume")
            self._write(version)
            # It is sent to nobody: a worker that comes back loads it from the volume.
            self.writer.state = {}
            if self.writer.on_gpus is not None:
                self._release()

    async def registered_workers(self, is_there: IsThere = lambda: True) -> list[Worker]:
        """Return the workers that the router knows, once they are at least MIN_WORKERS.

        Raises:
            VersionGoneError: they are fewer, and the volume has lost the version that others could load.
            DependencyLostError: they are fewer after PUBLISH_SECONDS.
        """

        async def everyone(registered: list[Worker]) -> list[Worker]:
            return registered

        return await self._wait_for_workers(everyone, "are registered with the router", is_there)

    async def drop_workers(self, workers: Sequence[Worker]) -> None:
        """Remove workers from the routing; their launchers bring them up to date and register them again."""
        WORKERS_DROPPED.inc(len(workers))
        async with router_of(self.settings) as router:
            for worker in workers:
                await router.remove(worker.url)

    def engine(self, worker: Worker) -> Engine:
        """Return a worker's engine, with PUBLISH_SECONDS for each answer."""
        return worker.engine(self.settings.token, timeout=PUBLISH_SECONDS)

    async def _deliver(self, version: int) -> dict[str, float]:
        """Have all workers serve the version at once, drop those that do not, and return metrics.

        With fewer than MIN_WORKERS left, wait until launchers have brought others up to date.

        Raises:
            VersionGoneError: fewer than MIN_WORKERS serve the version, and the volume has lost it.
            DependencyLostError: fewer than MIN_WORKERS serve the version, even after PUBLISH_SECONDS more.
        """
        is_there = partial(self.writer.is_on_volume, version)
        workers = await self.registered_workers(is_there)
        form = self._form(version, workers)
        try:
            pauses = await asyncio.gather(*(self._bring(worker, form) for worker in workers))
        finally:
            await form.close()
        if self.broadcaster is not None and self.broadcaster.unformed >= MOST_UNFORMED:
            self._give_broadcasts_up(self.broadcaster.refusal)
        if failed := [worker for worker, pause in zip(workers, pauses, strict=True) if pause is None]:
            await self.drop_workers(failed)
        served = len(workers) - len(failed)
        if served < self.settings.min_workers:

            async def up_to_date(registered: list[Worker]) -> list[Worker]:
                versions = await asyncio.gather(*map(self._version_or_none, registered))
                return [worker for worker, served in zip(registered, versions, strict=True) if served == version]

            served = len(await self._wait_for_workers(up_to_date, f"serve policy version {version}", is_there))
        return {
            "workers": float(served),
            "pause_seconds": max((pause or 0.0 for pause in pauses), default=0.0),
            **({"publish_by_disk": 1.0} if self.refusal else {}),
        }

    def _give_broadcasts_up(self, reason: str) -> None:
        """Have the workers load all further versions from the shared volume."""
        self.refusal, self.broadcaster, self.writer.is_sent = reason, None, False
        log.error(
            f"the last {MOST_UNFORMED} versions could not be broadcast, so the rest of the run publishes over the "
            "shared volume; compare the versions and networks of NCCL on trainer and engines (docs/gpus.md), open port "
            f"{WEIGHTS_BROADCAST_PORT} between them, or set PUBLISH_TRANSPORT=disk",
            reason=reason,
        )

    def _form(self, version: int, workers: Sequence[Worker]) -> Form:
        """Return the form in which the workers get the version that was written last."""
        state, path = self.writer.state, self.writer.store.path(version)
        if not state:
            return Directory(version, path, is_adapter=self.settings.lora_rank > 0)
        if self.settings.lora_rank:
            return AdapterTensors(version, self.writer.policy.adapter_config(), pickle.dumps(state))
        self.writer.state = {}
        if self.writer.shares:
            check_shares_memory(workers, self.writer.ranks.device)
            return SharedTensors(version, self.writer.buckets(workers, state))
        assert self.broadcaster is not None, "state is kept for a transport that sends it"
        return Broadcast(self.broadcaster, version, state, [worker.url for worker in workers])

    async def _bring(self, worker: Worker, form: Form) -> float | None:
        """Have one worker serve a version; return the seconds of its pause, or None if it does not serve it."""
        requests: Requests = "continue" if self.settings.publishes_in_place else "finish"
        try:
            async with self.engine(worker) as engine:
                return await serve(engine, form, requests, PUBLISH_SECONDS)
        except (WorkerRefusedError, DependencyLostError, TimeoutError) as error:
            form.forgo(worker.url)
            reason = str(error) or "timed out"
            log.warning("worker not updated", url=worker.url, policy_version=form.version, reason=reason)
            return None

    async def _wait_for_workers(
        self, select: Callable[[list[Worker]], Awaitable[list[Worker]]], state: str, is_there: IsThere
    ) -> list[Worker]:
        """Wait until ``select`` keeps MIN_WORKERS registered workers or more; ``state`` describes them in the error."""
        selected: list[Worker] = []
        wanted = self.settings.min_workers
        try:
            async with asyncio.timeout(PUBLISH_SECONDS), router_of(self.settings) as router:
                while True:
                    selected = await select(await router.workers())
                    if len(selected) >= wanted:
                        return selected
                    if not await in_background(is_there):
                        raise VersionGoneError(f"the newest policy version has gone from {self.settings.policy_dir}")
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise DependencyLostError(
                f"{len(selected)} rollout workers {state} after {PUBLISH_SECONDS:g} s, MIN_WORKERS is {wanted}; see "
                "the rollout-server's log"
            ) from None

    async def _version_or_none(self, worker: Worker) -> int | None:
        try:
            async with worker.engine(self.settings.token, timeout=PROBE_SECONDS) as engine:
                return await engine.version()
        except (WorkerRefusedError, DependencyLostError):
            return None


@dataclass(frozen=True)
class AdapterTensors(Form):
    """A LoRA adapter in the request itself, because no engine receives adapters through a process group."""

    version: int
    config: dict[str, Any]
    """PEFT's configuration."""
    tensors: bytes
    """The pickled tensors."""
    is_adapter: bool = True

    async def load(self, worker: Engine) -> None:
        """See Form."""
        await worker.load_adapter_from_tensors(self.config, self.tensors, self.version)


def router_of(settings: TrainerSettings) -> RouterAdmin:
    """Return a client of the router that waits for it as long as for any service."""
    return RouterAdmin(token=settings.token, deadline=settings.service_deadline_seconds)


async def put_workers_to_sleep(settings: TrainerSettings) -> None:
    """Have every registered worker give its GPU's memory away; ``Engine.hold`` wakes it for the next version.

    A worker that does not fall asleep keeps its memory, and the step may do without.

    Raises:
        DependencyLostError: the router does not answer.
    """
    await _ask_workers(settings, "sleep", lambda _, engine: engine.sleep())


async def begin_profiles(settings: TrainerSettings, directory: Path) -> None:
    """Have every registered worker record what it does, for traces in a directory of its own in ``directory``.

    Raises:
        DependencyLostError: the router does not answer.
    """

    def begin(worker: Worker, engine: Engine) -> Awaitable[None]:
        name = "engine-" + re.sub(r"[^0-9A-Za-z.]+", "-", worker.url.split("//")[-1])
        return engine.begin_profile(directory / name)

    await _ask_workers(settings, "record a profile", begin)


async def end_profiles(settings: TrainerSettings) -> None:
    """Have every registered worker write its traces.

    Raises:
        DependencyLostError: the router does not answer.
    """
    await _ask_workers(settings, "write its profile", lambda _, engine: engine.end_profile())


async def _ask_workers(settings: TrainerSettings, what: str, ask: Callable[[Worker, Engine], Awaitable[None]]) -> None:
    """Ask every registered worker for ``what`` at once; what one refuses is a line in the log."""

    async def ask_one(worker: Worker) -> None:
        try:
            async with worker.engine(settings.token, timeout=ANSWER_SECONDS) as engine:
                await ask(worker, engine)
        except (WorkerRefusedError, DependencyLostError) as error:
            log.warning(f"a worker does not {what}", url=worker.url, reason=str(error))

    async with router_of(settings) as router:
        await asyncio.gather(*map(ask_one, await router.workers()))
