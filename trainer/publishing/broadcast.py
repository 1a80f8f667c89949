"""Publishing by broadcast: rank 0 sends buckets of tensors to all workers at once, over NCCL between GPUs, else gloo.

Rank 0 and the workers form a process group, which is created again whenever the workers change. Every worker stops
generating before the first tensor, so that nothing is computed with weights of two versions; a worker that does not
answer is left out of the group. The first request of a new group sends one small tensor, with a short deadline, because
NCCL connects the members then.

A worker that fails leaves the others waiting in a collective. So at its failure, or at the deadline, the group is
aborted, its members are told to leave it, and workers that do not serve the version leave the routing. They load it
from the shared volume, to which it is written beside the training.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from services.clients.rollout_admin import RouterAdmin, WorkerAdmin, WorkerRefusedError
from services.core.endpoints import WEIGHTS_BROADCAST_PORT, Task, bind_address, endpoint
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.weights.broadcast_group import SOURCE, broadcast_weights, join_weights_group, send_buckets
from trainer.config import TrainerSettings
from trainer.model.gathering import gather_state
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks
from trainer.model.saving import DiskFullError, write_model
from trainer.publishing.disk import write_version
from trainer.publishing.publisher import Publisher
from trainer.publishing.worker_group import LEAVE_SECONDS, GroupBrokenError, WorkerGroup
from trainer.publishing.workers import PUBLISH_SECONDS, registered_workers, update_workers, worker_admin
from trainer.service_thread import ServiceThread

log = get_logger(__name__)

BUCKET_BYTES = 1 << 29
"""Weights sent with one request. A worker needs one bucket beside its own weights and rank 0's device two; and a bucket
is large enough that requests take no time beside the transfer."""

FORM_SECONDS = 120.0
"""Longest wait until the members of a new group have met, and again until its first collective has ended."""

Bucket = dict[str, Tensor]


class BroadcastPublisher(Publisher):
    """A publisher that sends every version to all workers at once."""

    def __init__(self, settings: TrainerSettings, policy: Policy, ranks: Ranks, services: ServiceThread | None) -> None:
        super().__init__(settings, policy, ranks, services)
        self.backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        self.flattens = self.backend == "nccl"
        """Send the tensors of a bucket in one broadcast; over gloo that takes longer than one by one."""
        self._group: WorkerGroup | None = None
        # Writing goes on while the next step generates.
        self._writer = ThreadPoolExecutor(1, "policy-writer")
        self._writing: Future[None] | None = None
        self._state: dict[str, Tensor] = {}
        """The weights to send; on rank 0, until the workers have them."""

    def put_on_volume(self, version: int) -> None:
        """See Publisher."""
        state = gather_state(self.policy.full_parameters(self.rounding), self.ranks, copy=True)

        def start_writing() -> None:
            self._wait_until_written()
            self._state = state
            save = partial(write_model, self.policy, state, dtype=self.rounding.dtype)
            self._writing = self._writer.submit(write_version, self.store, version, save)

        self.ranks.on_main(start_writing, DiskFullError, DependencyLostError)

    def is_on_volume(self, version: int) -> bool:
        """See Publisher; a version that is being written counts."""
        return (self._writing is not None and not self._writing.done()) or super().is_on_volume(version)

    def close(self) -> None:
        """Wait until the last version is on the volume."""
        try:
            self._wait_until_written()
        except DependencyLostError as error:
            # Not raised, because it would hide the reason why the run ended.
            log.warning("the last policy version is not on the volume", reason=str(error))
        self._writer.shutdown(wait=False)

    def _wait_until_written(self) -> None:
        """Wait until the version that is being written, if any, is on the volume.

        Raises:
            DependencyLostError: it is not there after PUBLISH_SECONDS; DiskFullError: the disk is full.
        """
        if self._writing is None:
            return
        try:
            self._writing.result(PUBLISH_SECONDS)
        except TimeoutError:
            raise DependencyLostError(
                f"a policy version is not written to {self.store.policy_dir} after {PUBLISH_SECONDS:g} s; "
                "the volume is too slow or does not answer"
            ) from None

    async def deliver(self, version: int) -> dict[str, float]:
        """See Publisher."""
        is_there = partial(self.is_on_volume, version)
        urls = await registered_workers(self.settings, is_there)
        began, pauses = time.perf_counter(), [0.0]
        group = await self._group_or_none(await self._hold(urls))
        buckets = make_buckets(self._state, has_first_alone=group is not None and not group.is_formed)
        sending = None if group is None else asyncio.create_task(self._send(group, buckets))

        async def update(worker: WorkerAdmin) -> None:
            # A worker outside the group does not change. It is found to serve another version and leaves the routing.
            if group is not None and sending is not None and worker.url in group.registrations:
                await _receive(worker, group.name, version, buckets, sending, is_flattened=self.flattens)
                await worker.resume()
                pauses.append(time.perf_counter() - began)

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

    async def _send(self, group: WorkerGroup, buckets: Sequence[Bucket]) -> None:
        """Send all buckets; give the group up when that fails, does not end in time, or is cancelled.

        Raises:
            GroupBrokenError: it failed.
        """
        tensors = [list(bucket.values()) for bucket in buckets]
        try:
            if not group.is_formed:
                await group.send(partial(self._broadcast, tensors[:1]), FORM_SECONDS)
                tensors = tensors[1:]
            await group.send(partial(self._broadcast, tensors), PUBLISH_SECONDS)
        except (GroupBrokenError, asyncio.CancelledError):
            await asyncio.gather(group.leave(), *(self._dismiss(url, group.name) for url in group.registrations))
            raise

    def _broadcast(self, buckets: Sequence[Sequence[Tensor]], group: dist.ProcessGroup) -> None:
        if self.flattens:
            send_buckets(buckets, self.ranks.device, group, PUBLISH_SECONDS)
            return
        for tensor in chain.from_iterable(buckets):
            broadcast_weights(tensor.to(self.ranks.device), group, PUBLISH_SECONDS)

    async def _dismiss(self, url: str, group_name: str) -> None:
        """Tell a worker to leave a group, if it answers; a worker that restarted since does not know the group."""
        async with WorkerAdmin(url, token=self.settings.token, timeout=LEAVE_SECONDS) as worker:
            with contextlib.suppress(WorkerRefusedError, DependencyLostError):
                await worker.destroy_group(group_name)

    async def _group_or_none(self, urls: list[str]) -> WorkerGroup | None:
        try:
            return await self._group_of(urls) if urls else None
        except (WorkerRefusedError, DependencyLostError, GroupBrokenError, TimeoutError) as error:
            log.warning("no group for the broadcast", reason=str(error) or "timed out", workers=urls)
            return None

    async def _group_of(self, urls: list[str]) -> WorkerGroup:
        """Return the group of these workers: the present one, or a new one when the workers have changed."""
        async with RouterAdmin(token=self.settings.token) as router:
            registrations = {url: name for url, name in (await router.registrations()).items() if url in urls}
        if self._group is not None and self._group.registrations == registrations:
            return self._group
        old, self._group = self._group, None
        if old is not None:
            kept = [url for url in old.registrations if url in registrations]
            await asyncio.gather(old.leave(), *(self._dismiss(url, old.name) for url in kept))
        # A new name each time: workers remember the groups of a trainer that died, and refuse their names.
        group = WorkerGroup(f"{self.settings.run_id}-{uuid.uuid4().hex}", registrations)
        try:
            async with AsyncExitStack() as stack, asyncio.timeout(FORM_SECONDS):
                workers = [await stack.enter_async_context(worker_admin(self.settings, url)) for url in registrations]
                await self._join(group, workers)
        except BaseException:
            await asyncio.gather(group.leave(), *(self._dismiss(url, group.name) for url in registrations))
            raise
        self._group = group
        return group

    async def _join(self, group: WorkerGroup, workers: list[WorkerAdmin]) -> None:
        """Have rank 0 and the workers meet."""
        sizes = [await worker.tensor_parallel_size() for worker in workers]
        world_size = 1 + sum(sizes)
        if self.backend == "nccl":
            own = ".".join(map(str, torch.cuda.nccl.version()))
            others = [await worker.nccl_version() for worker in workers]
            log.info("forming a group for the broadcast", nccl=own, nccl_of_workers=others)
            if any(other not in (None, own) for other in others):
                log.warning("trainer and workers have different versions of NCCL", trainer=own, workers=others)
        meeting = endpoint(Task.TRAINER, WEIGHTS_BROADCAST_PORT)
        listen = bind_address(Task.TRAINER, WEIGHTS_BROADCAST_PORT)
        join = partial(
            join_weights_group,
            meeting.host if listen.host == "0.0.0.0" else listen.host,
            meeting.port,
            SOURCE,
            world_size,
            group.name,
            self.backend,
            FORM_SECONDS,
        )
        invitations = [
            worker.init_group(
                meeting.host, meeting.port, SOURCE + 1 + sum(sizes[:i]), world_size, group.name, self.backend
            )
            for i, worker in enumerate(workers)
        ]
        await asyncio.gather(group.join(join, FORM_SECONDS), *invitations)


def make_buckets(state: dict[str, Tensor], *, has_first_alone: bool) -> list[Bucket]:
    """Return the tensors in buckets of BUCKET_BYTES.

    Args:
        state: the tensors by name.
        has_first_alone: the first bucket has the smallest tensor alone.
    """
    first = [min(state, key=lambda name: state[name].nbytes)] if has_first_alone else []
    rest = {name: tensor for name, tensor in state.items() if name not in first}
    shards = split_torch_state_dict_into_shards(rest, max_shard_size=BUCKET_BYTES)
    groups = [first, *shards.filename_to_tensors.values()]
    return [{name: state[name] for name in names} for names in groups if names]


async def _receive(
    worker: WorkerAdmin,
    group_name: str,
    version: int,
    buckets: Sequence[Bucket],
    sending: asyncio.Task[None],
    *,
    is_flattened: bool,
) -> None:
    """Have a worker receive all buckets while they are sent; the last one carries the version.

    If the worker fails, the sending is given up, because the other workers would wait for it in vain.

    Raises:
        WorkerRefusedError: the worker or the sending failed.
    """

    async def receive() -> None:
        for number, bucket in enumerate(buckets, start=1):
            await worker.receive_weights(
                list(bucket),
                [str(value.dtype).removeprefix("torch.") for value in bucket.values()],
                [list(value.shape) for value in bucket.values()],
                group_name,
                version if number == len(buckets) else None,
                is_flattened=is_flattened,
            )
        await worker.end_update()

    receiving = asyncio.create_task(receive())
    try:
        await asyncio.wait({receiving, sending}, return_when=asyncio.FIRST_EXCEPTION)
        if not receiving.done():
            raise WorkerRefusedError(f"worker {worker.url} did not get the weights: the broadcast broke off")
        await receiving
    finally:
        receiving.cancel()
        sending.cancel()


async def _is_sent(sending: asyncio.Task[None]) -> bool:
    try:
        await sending
    except GroupBrokenError as error:
        log.warning("broadcast not finished", reason=str(error))
        return False
    except asyncio.CancelledError:
        if not sending.cancelled():
            raise
        log.warning("broadcast not finished", reason="a worker failed")
        return False
    return True
