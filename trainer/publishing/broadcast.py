"""Versions by broadcast: rank 0 sends buckets of tensors to all workers at once, over NCCL between GPUs, else gloo.

Rank 0 and the workers form a process group, which is created again whenever the workers change. Every worker stops
generating before the first tensor, so that nothing is computed with weights of two versions; a worker that does not
answer is left out of the group. The first request of a new group sends one small tensor, with a short deadline, because
NCCL connects the members then.

A worker that fails leaves the others waiting in a collective. So at its failure, or at the deadline, the group is
aborted, its members are told to leave it, and workers that do not serve the version leave the routing. They load it
from the shared volume, to which it is written during the training.

A collective whose peer is lost may never return: NCCL forms its communicator within the first one, without a deadline.
So each group has a fresh daemon thread. When a call exceeds its deadline, the group is aborted and its thread left
behind, and the next publication begins with another group.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import TypeVar

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from services.core.endpoints import WEIGHTS_BROADCAST_PORT, Task, bind_address, endpoint, reached_at
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.engines.engine import Engine, WorkerRefusedError
from services.engines.router import RouterAdmin, Worker
from services.engines.versions import Form
from services.weights.broadcast_group import (
    SOURCE,
    broadcast_weights,
    installed_nccl,
    join_weights_group,
    leave_weights_group,
    send_buckets,
)
from trainer.config import TrainerSettings

log = get_logger(__name__)

T = TypeVar("T")

BUCKET_BYTES = 1 << 29
"""Weights sent with one request. A worker needs one bucket in addition to its own weights, and rank 0's device two. A
bucket is large enough that requests take no time compared with the transfer."""
MOST_UNFORMED = 2
"""Publications in a row without a formed group, after which the run gives broadcasts up."""
FORM_SECONDS = 120.0
"""Longest wait until the members of a new group have met, and again until its first collective has ended."""
LEAVE_SECONDS = 10.0
"""Longest wait until a group is left, here and in a worker."""

Bucket = dict[str, Tensor]


class Broadcast(Form):
    """One version on its way to the workers."""

    def __init__(self, broadcaster: Broadcaster, version: int, state: dict[str, Tensor], urls: Sequence[str]) -> None:
        """Begin to wait for the workers at ``urls``, each of which is prepared or forgoes the version."""
        self.version = version
        self._broadcaster = broadcaster
        self._state = state
        self._awaited = set(urls)
        self._held: list[str] = []
        self._all_held = asyncio.Event()
        self._buckets: list[Bucket] = []
        self._group: WorkerGroup | None = None
        self._sending: asyncio.Task[None] | None = None
        self._refusal = ""
        self._start = asyncio.create_task(self._start_sending())

    async def prepare(self, worker: Engine) -> None:
        """See Form; the wait ends when all workers are held or forgo the version, and a group of those held is formed.

        Raises:
            WorkerRefusedError: there is no group.
        """
        await worker.begin_update()
        self._held.append(worker.url)
        self.forgo(worker.url)
        await asyncio.shield(self._start)
        if self._group is None or worker.url not in self._group.members:
            raise WorkerRefusedError(f"worker {worker.url} is in no group for the broadcast")

    async def load(self, worker: Engine) -> None:
        """See Form. If the worker fails, the sending is given up: the other workers would wait for it in vain.

        Raises:
            WorkerRefusedError: the worker or the sending failed.
        """
        sending = self._sending
        assert sending is not None, "the worker is prepared"
        receiving = asyncio.create_task(self._receive(worker))
        try:
            await asyncio.wait({receiving, sending}, return_when=asyncio.FIRST_EXCEPTION)
            if not receiving.done():
                raise WorkerRefusedError(f"worker {worker.url} did not get the weights: the broadcast broke off")
            await receiving
        except (WorkerRefusedError, DependencyLostError) as error:
            if receiving.done():
                self._refusal = self._refusal or str(error)
            raise
        finally:
            receiving.cancel()
            sending.cancel()

    def forgo(self, url: str) -> None:
        """See Form."""
        self._awaited.discard(url)
        if not self._awaited:
            self._all_held.set()

    async def close(self) -> None:
        """See Form; a group whose sending failed is not used again."""
        self._start.cancel()
        await asyncio.wait({self._start})
        if self._sending is not None and (failure := await _failure(self._sending)):
            self._broadcaster.group = None
            self._refusal = self._refusal or failure
        if self._group is not None and self._group.is_formed:
            self._broadcaster.unformed = 0
        elif self._held:
            self._broadcaster.unformed += 1
            self._broadcaster.refusal = self._refusal or self._broadcaster.refusal

    async def _start_sending(self) -> None:
        await self._all_held.wait()
        group = await self._broadcaster.group_or_none(self._held)
        if group is not None:
            self._group, self._buckets = group, make_buckets(self._state, has_first_alone=not group.is_formed)
            self._sending = asyncio.create_task(self._broadcaster.send(group, self._buckets))

    async def _receive(self, worker: Engine) -> None:
        """Have a worker receive all buckets; the last one carries the version."""
        assert self._group is not None, "the worker is prepared"
        for number, bucket in enumerate(self._buckets, start=1):
            await worker.receive_weights(
                list(bucket),
                [str(value.dtype).removeprefix("torch.") for value in bucket.values()],
                [list(value.shape) for value in bucket.values()],
                self._group.name,
                self.version if number == len(self._buckets) else None,
                is_flattened=self._broadcaster.flattens,
            )
        await worker.end_update()


class Broadcaster:
    """The sender of versions to groups of workers; a group lasts until the workers change."""

    def __init__(self, settings: TrainerSettings, device: torch.device, seconds: float) -> None:
        """Make a sender.

        Args:
            settings: the run's name and token.
            device: rank 0's device, from which the tensors are sent.
            seconds: longest time for all tensors of a version, and for each answer of a worker.
        """
        self.settings = settings
        self.device = device
        self.seconds = seconds
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.flattens = self.backend == "nccl"
        """Send the tensors of a bucket in one broadcast; over gloo that takes longer than one by one."""
        self.group: WorkerGroup | None = None
        self.unformed = 0
        """Publications in a row for which workers were held and no collective of a group has ended."""
        self.refusal = ""
        """The reason why the newest of them had no group."""

    async def send(self, group: WorkerGroup, buckets: Sequence[Bucket]) -> None:
        """Send all buckets; give the group up when that fails, does not end in time, or is cancelled.

        Raises:
            GroupBrokenError: it failed.
        """
        tensors = [list(bucket.values()) for bucket in buckets]
        try:
            if not group.is_formed:
                await group.send(partial(self._broadcast, tensors[:1]), FORM_SECONDS)
                tensors = tensors[1:]
            await group.send(partial(self._broadcast, tensors), self.seconds)
        except (GroupBrokenError, asyncio.CancelledError):
            await asyncio.gather(group.leave(), *(self._dismiss(each, group.name) for each in group.members.values()))
            raise

    def _broadcast(self, buckets: Sequence[Sequence[Tensor]], group: dist.ProcessGroup) -> None:
        if self.flattens:
            send_buckets(buckets, self.device, group, self.seconds)
            return
        for tensor in chain.from_iterable(buckets):
            broadcast_weights(tensor.to(self.device), group, self.seconds)

    async def _dismiss(self, worker: Worker, group_name: str) -> None:
        """Tell a worker to leave a group, if it answers; a worker that restarted since does not know the group."""
        with contextlib.suppress(WorkerRefusedError, DependencyLostError):
            async with worker.engine(self.settings.token, timeout=LEAVE_SECONDS) as engine:
                await engine.leave_group(group_name)

    async def group_or_none(self, urls: list[str]) -> WorkerGroup | None:
        """Return a group of these workers; None if there are none, or if they do not meet."""
        try:
            return await self._group_of(urls) if urls else None
        except (WorkerRefusedError, DependencyLostError, GroupBrokenError, TimeoutError) as error:
            self.refusal = str(error) or f"the workers did not join within {FORM_SECONDS:g} s"
            log.warning("no group for the broadcast", reason=self.refusal, workers=urls)
            return None

    async def _group_of(self, urls: list[str]) -> WorkerGroup:
        """Return the group of these workers: the present one, or a new one when the workers have changed."""
        async with RouterAdmin(token=self.settings.token) as router:
            members = {worker.url: worker for worker in await router.workers() if worker.url in urls}
        ids = {worker.id for worker in members.values()}
        if self.group is not None and self.group.ids == ids:
            return self.group
        old, self.group = self.group, None
        if old is not None:
            remaining = [member for url, member in old.members.items() if url in members]
            await asyncio.gather(old.leave(), *(self._dismiss(member, old.name) for member in remaining))
        # A new name each time: workers remember the groups of a trainer that died, and refuse their names.
        group = WorkerGroup(f"{self.settings.run_id}-{uuid.uuid4().hex}", members)
        try:
            async with AsyncExitStack() as stack, asyncio.timeout(FORM_SECONDS):
                engines = [member.engine(self.settings.token, timeout=self.seconds) for member in members.values()]
                await self._join(group, [await stack.enter_async_context(engine) for engine in engines])
        except BaseException:
            await asyncio.gather(group.leave(), *(self._dismiss(member, group.name) for member in members.values()))
            raise
        self.group = group
        return group

    async def _join(self, group: WorkerGroup, engines: list[Engine]) -> None:
        """Have rank 0 and the workers meet."""
        sizes = [await engine.tensor_parallel_size() for engine in engines]
        world_size = 1 + sum(sizes)
        if self.backend == "nccl":
            trainers = installed_nccl()
            others = [await engine.nccl_version() for engine in engines]
            log.info("forming a group for the broadcast", nccl=trainers, nccl_of_workers=others)
            if trainers and any(other not in (None, trainers) for other in others):
                log.warning("trainer and workers have different versions of NCCL", trainer=trainers, workers=others)
        meeting = endpoint(Task.TRAINER, WEIGHTS_BROADCAST_PORT)
        listen = bind_address(Task.TRAINER, WEIGHTS_BROADCAST_PORT)
        join = partial(
            join_weights_group,
            reached_at(listen, meeting).host,
            meeting.port,
            SOURCE,
            world_size,
            group.name,
            self.backend,
            FORM_SECONDS,
        )
        invitations = [
            engine.join_group(
                meeting.host, meeting.port, SOURCE + 1 + sum(sizes[:i]), world_size, group.name, self.backend
            )
            for i, engine in enumerate(engines)
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


async def _failure(sending: asyncio.Task[None]) -> str:
    """Wait for the end of a sending, and return why it failed; empty if it did not."""
    try:
        await sending
    except GroupBrokenError as error:
        reason = str(error)
    except asyncio.CancelledError:
        if not sending.cancelled():
            raise
        reason = "a worker failed"
    else:
        return ""
    log.warning("broadcast not finished", reason=reason)
    return reason


class GroupBrokenError(Exception):
    """A collective that failed or did not end by its deadline; its group can no longer be used."""


class WorkerGroup:
    """A broadcast group. Its calls run one after the other in its own thread."""

    def __init__(self, name: str, members: dict[str, Worker]) -> None:
        """Start the group's thread.

        Args:
            name: the group's name, the same for all members.
            members: the workers by URL.
        """
        self.name = name
        self.members = members
        self.ids = {worker.id for worker in members.values()}
        """The router's names of the members; a worker that restarted since has another one."""
        self.is_formed = False
        """True once a collective has ended, so that NCCL has its communicator."""
        self._process_group: dist.ProcessGroup | None = None
        self._is_left = False
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="broadcast", daemon=True).start()

    async def join(self, join: Callable[[], dist.ProcessGroup], seconds: float) -> None:
        """Join the process group.

        Raises:
            GroupBrokenError: the members did not meet within ``seconds``.
        """

        def enter() -> None:
            self._process_group = join()
            if self._is_left:  # The wait for this call was over before.
                leave_weights_group(self._process_group)

        await self._call(enter, seconds)

    async def send(self, send: Callable[[dist.ProcessGroup], None], seconds: float) -> None:
        """Run collectives.

        Raises:
            GroupBrokenError: one failed, or they did not end within ``seconds``.
        """
        group = self._process_group
        assert group is not None, "the group is joined"
        await self._call(lambda: send(group), seconds)
        self.is_formed = True

    async def leave(self) -> None:
        """Leave the group, and abort its collectives; wait LEAVE_SECONDS at most."""
        self._is_left = True
        self._tasks.put(None)
        group = self._process_group
        if group is None:
            return
        left: Future[None] = Future()
        # Not in the group's thread, which may be stuck; and gloo may wait for members that are gone.
        threading.Thread(target=_resolve, args=(left, lambda: leave_weights_group(group)), daemon=True).start()
        try:
            await asyncio.wait_for(asyncio.wrap_future(left), LEAVE_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            log.warning("broadcast group not left", group=self.name, reason=_reason(error))

    async def _call(self, work: Callable[[], T], seconds: float) -> T:
        done: Future[T] = Future()
        self._tasks.put(lambda: _resolve(done, work))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), seconds)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise GroupBrokenError(_reason(error, f"not ended within {seconds:g} s")) from error

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # which has a whole version of the weights


def _resolve(future: Future[T], work: Callable[[], T]) -> None:
    """Run ``work`` and hand its result or error to a future, unless nobody waits for it any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  # raised again where the future is awaited
        future.set_exception(error)
    else:
        future.set_result(result)


def _reason(error: BaseException, timed_out: str = "timed out") -> str:
    text = str(error)
    return timed_out if isinstance(error, TimeoutError) and not text else text.splitlines()[0] if text else repr(error)
