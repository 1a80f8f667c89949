"""Publishing by broadcast: rank 0 sends every tensor to all workers at once, over NCCL between GPUs, else over gloo.

Rank 0 and the workers form a process group of their own, made anew whenever the workers change. A worker that fails
leaves the others waiting in a collective; so every broadcast has a deadline, after which the group is given up and
who does not serve the version leaves the routing. The version is also written to the shared volume, beside the
training, since that is where such a worker gets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass

import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from services.endpoints import WEIGHTS_BROADCAST_PORT, Task, bind_address, endpoint
from services.errors import DependencyLostError
from services.logs import get_logger
from services.policy_store import PolicyStore
from services.rollout_control import WorkerControl, WorkerRefusedError
from services.weights_group import SOURCE, broadcast_weights, join_weights_group, leave_weights_group
from trainer.config import TrainerSettings
from trainer.distributed import Ranks
from trainer.policy import Policy, save_description
from trainer.publishing.disk import MARGIN_SECONDS, published_dtype
from trainer.publishing.workers import paused, registered_workers, update_workers
from trainer.service_thread import ServiceThread

log = get_logger(__name__)

BUCKET_BYTES = 1 << 30
"""What a worker has to hold beside its own weights while it receives."""


@dataclass(frozen=True)
class _Group:
    name: str
    urls: list[str]
    process_group: dist.ProcessGroup


class BroadcastPublisher:
    """Sends a version to every worker."""

    def __init__(self, settings: TrainerSettings, policy: Policy, ranks: Ranks, services: ServiceThread | None) -> None:
        self.settings = settings
        self.policy = policy
        self.ranks = ranks
        self.services = services
        self.store = PolicyStore(settings.policy_dir)
        self.backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        self._group: _Group | None = None
        self._groups_made = 0
        # One thread each: broadcasts wait for workers, and writing goes on while the next step generates.
        self._sender = ThreadPoolExecutor(1, "broadcast")
        self._writer = ThreadPoolExecutor(1, "policy-writer")
        self._written: Future[None] | None = None

    def publish(self, version: int) -> dict[str, float]:
        """See Publisher."""
        state: dict[str, Tensor] = {}
        for name, value in self.policy.full_parameters(published_dtype(self.settings)):
            if self.ranks.is_main:
                state[name] = value.to("cpu", copy=True)

        def work() -> int:
            assert self.services is not None
            if self._written is not None:
                self._written.result(self.settings.publish_deadline_seconds)
            self._written = self._writer.submit(self._write, version, state)
            deadline = 2 * self.settings.publish_deadline_seconds + MARGIN_SECONDS
            return self.services.call(self._update_workers(version, state), deadline)

        return {"workers": float(self.ranks.on_main(work, DependencyLostError))}

    def close(self) -> None:
        """Waits until the last version is on the volume."""
        if self._written is not None:
            self._written.result(self.settings.publish_deadline_seconds)
        self._writer.shutdown()
        self._sender.shutdown(wait=False, cancel_futures=True)

    def _write(self, version: int, state: dict[str, Tensor]) -> None:
        directory = self.store.begin(version)
        save_torch_state_dict(state, directory, metadata={"format": "pt"})
        save_description(self.policy, self.settings, directory, published_dtype(self.settings))
        self.store.commit(version)
        self.store.prune(self.settings.published_versions_kept)

    async def _update_workers(self, version: int, state: dict[str, Tensor]) -> int:
        urls = await registered_workers(self.settings)
        deadline = self.settings.publish_deadline_seconds
        try:
            group = await self._group_of(urls)
        except (WorkerRefusedError, DependencyLostError, RuntimeError, TimeoutError) as error:
            # Without a group nobody receives, so every worker is found to serve another version, and leaves.
            log.warning("no group for the broadcast", reason=str(error) or "timed out", workers=urls)
            self._group = group = None

        async def update(worker: WorkerControl, _index: int) -> None:
            if group is None:
                return
            if self.settings.publish_in_place:
                async with paused(worker):
                    await self._receive(worker, group, version, state)
            else:
                await self._receive(worker, group, version, state)

        loop = asyncio.get_running_loop()
        sending = None if group is None else loop.run_in_executor(self._sender, self._send, group, state)
        left = await update_workers(self.settings, urls, version, update)
        if sending is not None:
            try:
                await asyncio.wait_for(sending, deadline)
            except (RuntimeError, TimeoutError) as error:
                log.warning("broadcast not finished", reason=str(error).splitlines()[0] if str(error) else "timed out")
                left = 0 if left == len(urls) else left
        if left < len(urls):
            self._group = None
        return left

    async def _receive(self, worker: WorkerControl, group: _Group, version: int, state: dict[str, Tensor]) -> None:
        await worker.begin_update()
        for names in _buckets(state):
            tensors = [state[name] for name in names]
            await worker.receive_weights(
                names,
                [str(t.dtype).removeprefix("torch.") for t in tensors],
                [list(t.shape) for t in tensors],
                group.name,
                version,
                flush_cache=not self.settings.publish_in_place,
            )
        await worker.end_update()

    def _send(self, group: _Group, state: dict[str, Tensor]) -> None:
        for value in state.values():
            broadcast_weights(value.to(self.ranks.device), group.process_group, self.settings.publish_deadline_seconds)

    async def _group_of(self, urls: list[str]) -> _Group:
        """The group of these workers: the present one, or a new one when they are others."""
        if self._group is not None and self._group.urls == urls:
            return self._group
        old, self._group = self._group, None
        if old is not None:
            leave_weights_group(old.process_group)
        self._groups_made += 1
        name = f"{self.settings.run_id}-{self.ranks.rank}-{self._groups_made}"
        meeting = endpoint(Task.TRAINER, WEIGHTS_BROADCAST_PORT)
        listen = bind_address(Task.TRAINER, WEIGHTS_BROADCAST_PORT)
        deadline = self.settings.publish_deadline_seconds
        async with AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(WorkerControl(url, token=self.settings.token)) for url in urls]
            sizes = [await worker.tensor_parallel_size() for worker in workers]
            world_size = 1 + sum(sizes)
            joining = asyncio.get_running_loop().run_in_executor(
                self._sender,
                join_weights_group,
                meeting.host if listen.host == "0.0.0.0" else listen.host,
                meeting.port,
                SOURCE,
                world_size,
                name,
                self.backend,
                deadline,
            )
            invitations = [
                worker.init_group(
                    meeting.host, meeting.port, SOURCE + 1 + sum(sizes[:i]), world_size, name, self.backend
                )
                for i, worker in enumerate(workers)
            ]
            async with asyncio.timeout(deadline):
                await asyncio.gather(joining, *invitations)
            if old is not None:
                for worker in workers:
                    if worker.url in old.urls:
                        await worker.destroy_group(old.name)
        self._group = _Group(name, urls, joining.result())
        return self._group


def _buckets(state: dict[str, Tensor]) -> Iterator[list[str]]:
    """Names in order, cut so that each list's tensors take at most BUCKET_BYTES (or are a single tensor)."""
    names: list[str] = []
    used = 0
    for name, value in state.items():
        if names and used + value.nbytes > BUCKET_BYTES:
            yield names
            names, used = [], 0
        names.append(name)
        used += value.nbytes
    if names:
        yield names
