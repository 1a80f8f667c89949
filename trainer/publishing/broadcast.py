"""Versions by broadcast: rank 0 sends buckets of tensors to all workers at once, over NCCL between GPUs, else gloo.

Rank 0 and the workers form a process group, which is created again whenever the workers change. Every worker stops
generating before the first tensor, so that nothing is computed with weights of two versions; a worker that does not
answer is left out of the group. The first request of a new group sends one small tensor, with a short deadline, because
NCCL connects the members then.

A worker that fails leaves the others waiting in a collective. So at its failure, or at the deadline, the group is
aborted, its members are told to leave it, and workers that do not serve the version leave the routing. They load it
from the shared volume, to which it is written during the training.

A collective whose peer is lost may never return: NCCL forms its communicator within the first one, without a deadline.
So collectives run in daemon threads. When one exceeds its deadline, the group is aborted and the thread left behind,
and the next publication begins with another group.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from services.core.endpoints import WEIGHTS_BROADCAST_PORT, Task, bind_address, endpoint, reached_at
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.engines.engine import Check, Engine, Requests, WorkerRefusedError
from services.engines.proof import UnprovenError
from services.engines.router import Worker
from services.weights.broadcast_group import (
    SOURCE,
    join_weights_group,
    leave_weights_group,
    send_buckets,
)
from trainer.config import TrainerSettings

log = get_logger(__name__)

BUCKET_BYTES = 1 << 29
"""Weights sent with one request. A worker needs one bucket in addition to its own weights, and rank 0's device two. A
bucket is large enough that requests take no time compared with the transfer."""
MOST_UNFORMED = 2
"""Publications in a row without a formed group, after which the run gives broadcasts up."""
FORM_SECONDS = 120.0
"""Longest wait until the members of a new group have met, and again until its first collective has ended."""
LEAVE_SECONDS = 10.0
"""Longest wait until a group is left, here and in a worker."""

State = dict[str, Tensor]
"""Tensors of a version by name."""
Resume = Callable[[Engine], Awaitable[float]]
"""Has an engine that has got a version prove and serve it; returns the seconds of its pause."""
Outcome = float | BaseException
"""The seconds of a worker's pause, or the error for which it does not serve the version."""


class GroupBrokenError(Exception):
    """A collective that failed or did not end by its deadline; its group can no longer be used."""


class WorkerGroup:
    """A broadcast group of rank 0 and workers."""

    def __init__(self, name: str, ids: set[str]) -> None:
        """Describe a group.

        Args:
            name: the same for all members.
            ids: the router's names of the workers; a worker that restarted since has another one.
        """
        self.name = name
        self.ids = ids
        self.process_group: dist.ProcessGroup | None = None
        self.is_formed = False
        """True once a collective has ended, so that NCCL has its communicator."""
        self._is_left = False

    async def join(self, join: Callable[[], dist.ProcessGroup]) -> None:
        """Join the process group.

        Raises:
            GroupBrokenError: the members did not meet within FORM_SECONDS.
        """

        def enter() -> None:
            self.process_group = join()
            if self._is_left:  # The wait for this call was over before.
                leave_weights_group(self.process_group)

        with _breaking(FORM_SECONDS):
            await asyncio.wait_for(in_background(enter), FORM_SECONDS)

    async def leave(self) -> None:
        """Leave the group, and abort its collectives; wait LEAVE_SECONDS at most."""
        self._is_left = True
        if self.process_group is None:
            return
        try:
            # In a thread, because gloo may wait for members that are gone.
            leaving = in_background(partial(leave_weights_group, self.process_group))
            await asyncio.wait_for(leaving, LEAVE_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            log.warning("broadcast group not left", group=self.name, reason=str(error) or "timed out")


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

    async def send(
        self, version: int, state: State, workers: Sequence[Worker], requests: Requests, check: Check | None = None
    ) -> list[Outcome]:
        """Have workers serve a version of these tensors; return the outcome of each.

        All of them are held first, and those that are form a group. Each is checked before it generates again.
        """
        started = time.perf_counter()
        async with AsyncExitStack() as stack:
            opened = [worker.engine(self.settings.token, timeout=self.seconds) for worker in workers]
            engines = [await stack.enter_async_context(engine) for engine in opened]
            holding = (self._hold(engine, requests) for engine in engines)
            outcomes: list[Outcome | None] = [*await asyncio.gather(*holding, return_exceptions=True)]
            held = {place: engines[place] for place, error in enumerate(outcomes) if error is None}
            chosen = [workers[place] for place in held]
            sent = await self._send_to(
                chosen, [*held.values()], state, version, lambda engine: engine.resume_with(version, started, check)
            )
            others = iter(sent)
            return [next(others) if outcome is None else outcome for outcome in outcomes]

    async def _hold(self, engine: Engine, requests: Requests) -> None:
        async with asyncio.timeout(self.seconds):
            await engine.hold(requests)
        await engine.begin_update()

    async def _send_to(
        self, workers: Sequence[Worker], engines: Sequence[Engine], state: State, version: int, resume: Resume
    ) -> Sequence[Outcome]:
        """Send a version to workers that are held; return the outcome of each.

        If one fails, the sending is given up, because the others would wait for it in vain.
        """
        if not workers:
            return []
        group = await self._group_of(workers, engines)
        if group is None:
            return [WorkerRefusedError(f"worker {each.url} is in no group for the broadcast") for each in workers]
        buckets = make_buckets(state, has_first_alone=not group.is_formed)
        sending = asyncio.create_task(self._broadcast(group, [list(bucket.values()) for bucket in buckets]))
        receive = partial(self._receive, group=group, buckets=buckets, version=version, resume=resume)
        receiving = [asyncio.create_task(receive(each)) for each in engines]
        failures: list[str] = []
        try:
            await asyncio.wait([sending, *receiving], return_when=asyncio.FIRST_EXCEPTION)
            failures = [str(task.exception()) for task in (*receiving, sending) if task.done() and task.exception()]
            if sending.done() and not sending.exception():
                await asyncio.wait(receiving)
        finally:
            for task in (sending, *receiving):
                task.cancel()
            await asyncio.wait([sending, *receiving])
            if sending.cancelled() or sending.exception():
                log.warning("broadcast not finished", reason="; ".join(failures) or "given up")
                self.group = None
                await self._end(group, workers)
        self._count(is_formed=group.is_formed, refusal="; ".join(failures))
        return [
            WorkerRefusedError(f"worker {worker.url} did not get the weights: the broadcast broke off")
            if task.cancelled()
            else task.exception() or task.result()
            for worker, task in zip(workers, receiving, strict=True)
        ]

    async def _broadcast(self, group: WorkerGroup, buckets: Sequence[Sequence[Tensor]]) -> None:
        """Run the collectives of all buckets; those of a new group begin with the first bucket alone.

        Raises:
            GroupBrokenError: one failed, or they did not end in time.
        """
        assert group.process_group is not None, "the group is joined"
        alone = 0 if group.is_formed else 1
        for part, seconds in ((buckets[:alone], FORM_SECONDS), (buckets[alone:], self.seconds)):
            send = partial(send_buckets, part, self.device, group.process_group, self.seconds, flattens=self.flattens)
            with _breaking(seconds):
                await asyncio.wait_for(in_background(send), seconds)
            group.is_formed = True

    async def _receive(
        self, engine: Engine, group: WorkerGroup, buckets: Sequence[State], version: int, resume: Resume
    ) -> Outcome:
        """Have a worker receive all buckets, the last of which carries the version, and serve it."""
        for number, bucket in enumerate(buckets, start=1):
            await engine.receive_weights(
                list(bucket),
                [str(value.dtype).removeprefix("torch.") for value in bucket.values()],
                [list(value.shape) for value in bucket.values()],
                group.name,
                version if number == len(buckets) else None,
                is_flattened=self.flattens,
            )
        await engine.end_update()
        try:
            return await resume(engine)
        except UnprovenError as error:
            return error  # Not raised, because the others have got the version.

    async def _group_of(self, workers: Sequence[Worker], engines: Sequence[Engine]) -> WorkerGroup | None:
        """Return the group of these workers: the present one, or a new one when the workers have changed.

        None if they do not meet.
        """
        ids = {worker.id for worker in workers}
        if self.group is not None and self.group.ids == ids:
            return self.group
        old, self.group = self.group, None
        if old is not None:
            await self._end(old, workers)
        # A new name each time: workers remember the groups of a trainer that died, and refuse their names.
        group = WorkerGroup(f"{self.settings.run_id}-{uuid.uuid4().hex}", ids)
        try:
            async with asyncio.timeout(FORM_SECONDS):
                await self._join(group, engines)
        except (WorkerRefusedError, DependencyLostError, GroupBrokenError, TimeoutError) as error:
            reason = str(error) or f"the workers did not join within {FORM_SECONDS:g} s"
            log.warning("no group for the broadcast", reason=reason, workers=[worker.url for worker in workers])
            self._count(is_formed=False, refusal=reason)
        else:
            self.group = group
        finally:
            if self.group is None:
                await self._end(group, workers)
        return self.group

    async def _join(self, group: WorkerGroup, engines: Sequence[Engine]) -> None:
        """Have rank 0 and the workers meet."""
        sizes = [await engine.tensor_parallel_size() for engine in engines]
        world_size = 1 + sum(sizes)
        meeting = endpoint(Task.TRAINER, WEIGHTS_BROADCAST_PORT)
        listen = reached_at(bind_address(Task.TRAINER, WEIGHTS_BROADCAST_PORT), meeting).host
        common = (world_size, group.name, self.backend)
        invitations = [
            engine.join_group(meeting.host, meeting.port, SOURCE + 1 + sum(sizes[:i]), *common)
            for i, engine in enumerate(engines)
        ]
        own = partial(join_weights_group, listen, meeting.port, SOURCE, *common, FORM_SECONDS)
        await asyncio.gather(group.join(own), *invitations)

    async def _end(self, group: WorkerGroup, workers: Sequence[Worker]) -> None:
        """Leave a group, and have those of the workers leave it that are in it."""
        await asyncio.gather(group.leave(), *(self._dismiss(worker, group.name) for worker in workers))

    async def _dismiss(self, worker: Worker, group_name: str) -> None:
        """Tell a worker to leave a group, if it answers; a worker that restarted since does not know the group."""
        with contextlib.suppress(WorkerRefusedError, DependencyLostError):
            async with worker.engine(self.settings.token, timeout=LEAVE_SECONDS) as engine:
                await engine.leave_group(group_name)

    def _count(self, *, is_formed: bool, refusal: str) -> None:
        self.unformed = 0 if is_formed else self.unformed + 1
        self.refusal = self.refusal if is_formed else refusal


def make_buckets(state: State, *, has_first_alone: bool) -> list[State]:
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


@contextmanager
def _breaking(seconds: float) -> Iterator[None]:
    """Raise GroupBrokenError in place of the error of a collective, which has ``seconds`` within the block."""
    try:
        yield
    except (RuntimeError, ValueError, TimeoutError) as error:
        reason = next(iter(str(error).splitlines()), f"not ended within {seconds:g} s")
        raise GroupBrokenError(reason) from error
