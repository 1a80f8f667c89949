"""Publishing by broadcast: rank 0 sends every tensor to all workers at once, over NCCL between GPUs, else over gloo.

Rank 0 and the workers form a process group, which is created again whenever the workers change. Every worker stops
generating before the first tensor, so that nothing is computed with weights of two versions; a worker that does not
answer is left out of the group. A worker that fails later leaves the others waiting in a collective. So every broadcast
has a deadline, after which the group is given up, and workers that do not serve the version leave the routing. They
load it from the shared volume, to which it is written beside the training.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from services.clients.rollout_admin import RouterAdmin, WorkerAdmin, WorkerRefusedError
from services.core.endpoints import WEIGHTS_BROADCAST_PORT, Task, bind_address, endpoint
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.weights.broadcast_group import SOURCE, broadcast_weights, join_weights_group, leave_weights_group
from trainer.checkpoints.volume import DiskFullError
from trainer.config import TrainerSettings
from trainer.model.policy import Policy, gather_state, write_model
from trainer.model.ranks import Ranks
from trainer.publishing.disk import published_dtype, write_version
from trainer.publishing.publisher import Publisher
from trainer.publishing.workers import PUBLISH_SECONDS, registered_workers, update_workers, worker_admin
from trainer.service_thread import ServiceThread

log = get_logger(__name__)

BUCKET_BYTES = 1 << 30
"""Weights sent with one request: the memory that a worker needs beside its own weights, and large enough that requests
take no time beside the transfer."""


@dataclass(frozen=True)
class _Group:
    name: str
    registrations: dict[str, str]
    """The router's id of each member, by its URL; a worker that restarted since has another id."""
    process_group: dist.ProcessGroup


class BroadcastPublisher(Publisher):
    """A publisher that sends every version to all workers at once."""

    def __init__(self, settings: TrainerSettings, policy: Policy, ranks: Ranks, services: ServiceThread | None) -> None:
        super().__init__(settings, policy, ranks, services)
        self.backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        self._group: _Group | None = None
        # One thread each: broadcasts wait for workers, and writing goes on while the next step generates.
        self._sender = ThreadPoolExecutor(1, "broadcast")
        self._writer = ThreadPoolExecutor(1, "policy-writer")
        self._writing: Future[None] | None = None
        self._state: dict[str, Tensor] = {}
        """The weights to send; on rank 0, until the workers have them."""

    def put_on_volume(self, version: int) -> None:
        """See Publisher."""
        dtype = published_dtype(self.settings)
        state = gather_state(self.policy.full_parameters(dtype), self.ranks, copy=True)

        def start_writing() -> None:
            if self._writing is not None:
                self._writing.result(PUBLISH_SECONDS)
            self._state = state
            save = partial(write_model, self.policy, state, dtype=dtype)
            self._writing = self._writer.submit(write_version, self.store, version, save)

        self.ranks.on_main(start_writing, DiskFullError)

    def is_on_volume(self, version: int) -> bool:
        """See Publisher; a version that is being written counts."""
        return (self._writing is not None and not self._writing.done()) or super().is_on_volume(version)

    def close(self) -> None:
        """Wait until the last version is on the volume."""
        if self._writing is not None:
            try:
                self._writing.result(PUBLISH_SECONDS)
            except DiskFullError as error:
                # Not raised, because it would hide the reason why the run ended.
                log.warning("the last policy version is not on the volume", reason=str(error))
        self._writer.shutdown()
        self._sender.shutdown(wait=False, cancel_futures=True)

    async def deliver(self, version: int) -> dict[str, float]:
        """See Publisher."""
        is_there = partial(self.is_on_volume, version)
        urls = await registered_workers(self.settings, is_there)
        began, pauses = time.perf_counter(), [0.0]
        group = await self._group_or_none(await self._hold(urls))
        shards = split_torch_state_dict_into_shards(self._state, max_shard_size=BUCKET_BYTES)
        buckets = [{name: self._state[name] for name in names} for names in shards.filename_to_tensors.values()]

        async def update(worker: WorkerAdmin) -> None:
            # A worker outside the group does not change. It is found to serve another version and leaves the routing.
            if group is not None and worker.url in group.registrations:
                await _receive(worker, group, version, buckets)
                await worker.resume()
                pauses.append(time.perf_counter() - began)

        loop = asyncio.get_running_loop()
        sending = None if group is None else loop.run_in_executor(self._sender, self._send, group, buckets)
        try:
            served = await update_workers(self.settings, urls, version, update, is_there)
        finally:
            if sending is not None and not await _is_sent(sending):
                self._group = None
        self._state = {}
        return {"workers": float(served), "pause_seconds": max(pauses)}

    async def _hold(self, urls: list[str]) -> list[str]:
        """Have the workers stop generating and open an update; return the URLs of those that did."""

        async def is_held(url: str) -> bool:
            try:
                async with worker_admin(self.settings, url) as worker, asyncio.timeout(PUBLISH_SECONDS):
                    await worker.hold(finishes_requests=not self.settings.publishes_in_place)
                    await worker.begin_update()
            except (WorkerRefusedError, DependencyLostError, TimeoutError) as error:
                log.warning("worker left out of the broadcast", url=url, reason=str(error) or "timed out")
                return False
            return True

        held = await asyncio.gather(*map(is_held, urls))
        return [url for url, ok in zip(urls, held, strict=True) if ok]

    def _send(self, group: _Group, buckets: list[dict[str, Tensor]]) -> None:
        for bucket in buckets:
            for value in bucket.values():
                broadcast_weights(value.to(self.ranks.device), group.process_group, PUBLISH_SECONDS)

    async def _group_or_none(self, urls: list[str]) -> _Group | None:
        try:
            return await self._group_of(urls) if urls else None
        except (WorkerRefusedError, DependencyLostError, RuntimeError, TimeoutError) as error:
            log.warning("no group for the broadcast", reason=str(error) or "timed out", workers=urls)
            return None

    async def _group_of(self, urls: list[str]) -> _Group:
        """Return the group of these workers: the present one, or a new one when the workers have changed."""
        async with RouterAdmin(token=self.settings.token) as router:
            registrations = {url: name for url, name in (await router.registrations()).items() if url in urls}
        if self._group is not None and self._group.registrations == registrations:
            return self._group
        old, self._group = self._group, None
        if old is not None:
            # In a thread, because gloo may wait for members that are gone.
            leaving = asyncio.get_running_loop().run_in_executor(self._sender, leave_weights_group, old.process_group)
            await asyncio.wait_for(leaving, PUBLISH_SECONDS)
        # A new name each time: workers remember the groups of a trainer that died, and refuse their names.
        name = f"{self.settings.run_id}-{uuid.uuid4().hex}"
        async with AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(worker_admin(self.settings, url)) for url in registrations]
            async with asyncio.timeout(PUBLISH_SECONDS):
                process_group = await self._join(workers, name)
                for worker in workers:
                    if old is not None and worker.url in old.registrations:
                        # A worker that restarted since does not know the old group and refuses.
                        with contextlib.suppress(WorkerRefusedError):
                            await worker.destroy_group(old.name)
        self._group = _Group(name, registrations, process_group)
        return self._group

    async def _join(self, workers: list[WorkerAdmin], name: str) -> dist.ProcessGroup:
        """Create the process group of rank 0 and the workers."""
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
            PUBLISH_SECONDS,
        )
        invitations = [
            worker.init_group(meeting.host, meeting.port, SOURCE + 1 + sum(sizes[:i]), world_size, name, self.backend)
            for i, worker in enumerate(workers)
        ]
        await asyncio.gather(joining, *invitations)
        return joining.result()


async def _receive(worker: WorkerAdmin, group: _Group, version: int, buckets: list[dict[str, Tensor]]) -> None:
    """Have a worker receive all buckets; the last one carries the version."""
    for number, bucket in enumerate(buckets, start=1):
        await worker.receive_weights(
            list(bucket),
            [str(value.dtype).removeprefix("torch.") for value in bucket.values()],
            [list(value.shape) for value in bucket.values()],
            group.name,
            version if number == len(buckets) else None,
        )
    await worker.end_update()


async def _is_sent(sending: asyncio.Future[None]) -> bool:
    try:
        await asyncio.wait_for(sending, PUBLISH_SECONDS)
    except (RuntimeError, TimeoutError) as error:
        log.warning("broadcast not finished", reason=str(error).splitlines()[0] if str(error) else "timed out")
        return False
    return True
