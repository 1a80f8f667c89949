"""Publishing by broadcast: rank 0 sends every tensor to all workers at once, over NCCL between GPUs, else over gloo.

Rank 0 and the workers form a process group of their own, made anew whenever the workers change. First every worker
stops generating, so that nothing is computed with weights of two versions, and one that does not answer is left out of
the group. One that fails later leaves the others waiting in a collective; so every broadcast has a deadline, after
which the group is given up and who does not serve the version leaves the routing. The version is also written to the
shared volume, beside the training, since that is where such a worker gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from services.clients.rollout_admin import RouterAdmin, WorkerAdmin, WorkerRefusedError
from services.core.endpoints import WEIGHTS_BROADCAST_PORT, Task, bind_address, endpoint
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.weights.broadcast_group import SOURCE, broadcast_weights, join_weights_group, leave_weights_group
from trainer.checkpoints.volume import DiskFullError, writing
from trainer.config import TrainerSettings
from trainer.model.policy import Policy, save_description
from trainer.model.ranks import Ranks
from trainer.publishing.disk import begin_version, commit_version, published_dtype
from trainer.publishing.publisher import Publisher
from trainer.publishing.workers import VersionGoneError, registered_workers, update_workers, worker_control
from trainer.service_thread import ServiceThread

log = get_logger(__name__)


@dataclass(frozen=True)
class _Group:
    name: str
    registrations: dict[str, str]
    """What the router called each member when the group was made: a worker that was restarted has another name."""
    process_group: dist.ProcessGroup


class BroadcastPublisher(Publisher):
    """Sends a version to every worker."""

    def __init__(self, settings: TrainerSettings, policy: Policy, ranks: Ranks, services: ServiceThread | None) -> None:
        super().__init__(settings, policy, ranks, services)
        self.backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        self._group: _Group | None = None
        # One thread each: broadcasts wait for workers, and writing goes on while the next step generates.
        self._sender = ThreadPoolExecutor(1, "broadcast")
        self._writer = ThreadPoolExecutor(1, "policy-writer")
        self._writing: Future[None] | None = None
        self._state: dict[str, Tensor] = {}
        """The weights for the workers; on rank 0."""

    def put_on_volume(self, version: int) -> None:
        """See Publisher."""
        state: dict[str, Tensor] = {}
        for name, value in self.policy.full_parameters(published_dtype(self.settings)):
            if self.ranks.is_main:
                state[name] = value.to("cpu", copy=True)

        def work() -> None:
            if self._writing is not None:
                self._writing.result(self.settings.publish_deadline_seconds)
            self._state = state
            self._writing = self._writer.submit(self._write, version, state)

        self.ranks.on_main(work, DiskFullError)

    def update_workers(self, version: int) -> dict[str, float]:
        """See Publisher."""

        def work() -> dict[str, float]:
            assert self.services is not None
            return self.services.call(self._update_workers(version, self._state))

        metrics: dict[str, float] = self.ranks.on_main(work, VersionGoneError, DependencyLostError)
        self._state = {}
        return metrics

    def close(self) -> None:
        """Waits until the last version is on the volume."""
        if self._writing is not None:
            try:
                self._writing.result(self.settings.publish_deadline_seconds)
            except DiskFullError as error:
                # Not raised: the run has ended, and why it did must not be hidden.
                log.warning("the last policy version is not on the volume", reason=str(error))
        self._writer.shutdown()
        self._sender.shutdown(wait=False, cancel_futures=True)

    def _write(self, version: int, state: dict[str, Tensor]) -> None:
        directory = begin_version(self.store, version, self.settings)
        try:
            with writing(directory):
                save_torch_state_dict(state, directory, metadata={"format": "pt"})
                save_description(self.policy, directory, published_dtype(self.settings))
        except DiskFullError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        commit_version(self.store, version, self.settings)

    def is_on_volume(self, version: int) -> bool:
        """See Publisher; one that is being written counts."""
        return (self._writing is not None and not self._writing.done()) or super().is_on_volume(version)

    async def _update_workers(self, version: int, state: dict[str, Tensor]) -> dict[str, float]:
        is_there = partial(self.is_on_volume, version)
        urls = await registered_workers(self.settings, is_there)
        began, pauses = time.perf_counter(), [0.0]
        held = await self._hold(urls)
        group = await self._group_or_none(held)

        async def update(worker: WorkerAdmin, _index: int) -> None:
            # One that is left out stays as it is; it is found to serve another version, and leaves.
            if group is not None and worker.url in group.registrations:
                await self._receive(worker, group, version, state)
                await worker.resume()
                pauses.append(time.perf_counter() - began)

        loop = asyncio.get_running_loop()
        sending = None if group is None else loop.run_in_executor(self._sender, self._send, group, state)
        try:
            served = await update_workers(self.settings, urls, version, update, is_there)
        finally:
            if sending is not None and not await self._is_sent(sending):
                self._group = None
        return {"workers": float(served), "pause_seconds": max(pauses)}

    async def _is_sent(self, sending: asyncio.Future[None]) -> bool:
        try:
            await asyncio.wait_for(sending, self.settings.publish_deadline_seconds)
        except (RuntimeError, TimeoutError) as error:
            log.warning("broadcast not finished", reason=str(error).splitlines()[0] if str(error) else "timed out")
            return False
        return True

    async def _hold(self, urls: list[str]) -> list[str]:
        """Has the workers stop generating and open an update; returns those that did."""

        async def hold(url: str) -> bool:
            async with worker_control(self.settings, url) as worker:
                try:
                    async with asyncio.timeout(self.settings.publish_deadline_seconds):
                        await worker.hold(finishes_requests=not self.settings.publish_in_place)
                        await worker.begin_update()
                except (WorkerRefusedError, DependencyLostError, TimeoutError) as error:
                    log.warning("worker left out of the broadcast", url=url, reason=str(error) or "timed out")
                    return False
            return True

        held = await asyncio.gather(*map(hold, urls))
        return [url for url, is_held in zip(urls, held, strict=True) if is_held]

    async def _receive(self, worker: WorkerAdmin, group: _Group, version: int, state: dict[str, Tensor]) -> None:
        buckets = list(_buckets(state, int(self.settings.publish_bucket_mib * (1 << 20))))
        for number, names in enumerate(buckets, start=1):
            tensors = [state[name] for name in names]
            await worker.receive_weights(
                names,
                [str(t.dtype).removeprefix("torch.") for t in tensors],
                [list(t.shape) for t in tensors],
                group.name,
                version if number == len(buckets) else None,
            )
        await worker.end_update()

    def _send(self, group: _Group, state: dict[str, Tensor]) -> None:
        for value in state.values():
            broadcast_weights(value.to(self.ranks.device), group.process_group, self.settings.publish_deadline_seconds)

    async def _group_or_none(self, urls: list[str]) -> _Group | None:
        try:
            return await self._group_of(urls) if urls else None
        except (WorkerRefusedError, DependencyLostError, RuntimeError, TimeoutError) as error:
            log.warning("no group for the broadcast", reason=str(error) or "timed out", workers=urls)
            return None

    async def _group_of(self, urls: list[str]) -> _Group:
        """The group of these workers: the present one, or a new one when they are others."""
        async with RouterAdmin(token=self.settings.token) as router:
            registrations = {url: name for url, name in (await router.registrations()).items() if url in urls}
        if self._group is not None and self._group.registrations == registrations:
            return self._group
        old, self._group = self._group, None
        if old is not None:
            # Beside the event loop: gloo's members may be gone.
            leaving = asyncio.get_running_loop().run_in_executor(self._sender, leave_weights_group, old.process_group)
            await asyncio.wait_for(leaving, self.settings.publish_deadline_seconds)
        # Workers remember the groups of a trainer that died, and refuse their names.
        name = f"{self.settings.run_id}-{uuid.uuid4().hex}"
        async with AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(worker_control(self.settings, url)) for url in registrations]
            async with asyncio.timeout(self.settings.publish_deadline_seconds):
                process_group = await self._meet(workers, name)
                for worker in workers:
                    if old is not None and worker.url in old.registrations:
                        # Refused by one that was restarted since.
                        with contextlib.suppress(WorkerRefusedError):
                            await worker.destroy_group(old.name)
        self._group = _Group(name, registrations, process_group)
        return self._group

    async def _meet(self, workers: list[WorkerAdmin], name: str) -> dist.ProcessGroup:
        sizes = [await worker.tensor_parallel_size() for worker in workers]
        world_size = 1 + sum(sizes)
        meeting = endpoint(Task.TRAINER, WEIGHTS_BROADCAST_PORT)
        listen = bind_address(Task.TRAINER, WEIGHTS_BROADCAST_PORT)
        joining = asyncio.get_running_loop().run_in_executor(
            self._sender,
            join_weights_group,
            meeting.host if listen.host == "0.0.0.0" else listen.host,
            meeting.port,
            SOURCE,
            world_size,
            name,
            self.backend,
            self.settings.publish_deadline_seconds,
        )
        invitations = [
            worker.init_group(meeting.host, meeting.port, SOURCE + 1 + sum(sizes[:i]), world_size, name, self.backend)
            for i, worker in enumerate(workers)
        ]
        await asyncio.gather(joining, *invitations)
        return joining.result()


def _buckets(state: dict[str, Tensor], limit: int) -> Iterator[list[str]]:
    """Names in order, cut so that each list's tensors take at most ``limit`` bytes (or are a single tensor)."""
    names: list[str] = []
    used = 0
    for name, value in state.items():
        if names and used + value.nbytes > limit:
            yield names
            names, used = [], 0
        names.append(name)
        used += value.nbytes
    if names:
        yield names
