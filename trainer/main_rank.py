"""Rank 0's dealings with the services: connects them, and does the parts of a step that happen over the network."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from services.clients.data import DataClient
from services.clients.replay import ReplayClient
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient
from services.clients.rollout_admin import RouterAdmin
from services.core.endpoints import Task
from services.core.errors import DependencyLostError, NeverReadyError
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.http.client import RequestRefusedError
from services.protocol import ComponentRecord, Cursor, DataStats, SampledGroup
from trainer.collector import Collector
from trainer.config import Mode, TrainerSettings
from trainer.publishing.workers import IsThere
from trainer.rollouts.evaluate import Evaluator
from trainer.rollouts.groups import GroupMaker
from trainer.rollouts.replay import sample_groups
from trainer.rollouts.sources import AsynchronousSource, Batch, GroupSource, SynchronousSource

log = get_logger(__name__)

WORKER_POLL_SECONDS = 0.2
VERSION_POLL_SECONDS = 2.0


class Conductor:
    """The services of a run.

    An async context manager. Entering it waits until data-server, reward-server and replay-buffer are healthy;
    NeverReadyError if they do not become so.
    """

    def __init__(self, settings: TrainerSettings, vocab_size: int) -> None:
        token, deadline = settings.token, settings.service_deadline_seconds
        self.settings = settings
        self.data = DataClient(token=token, deadline=deadline)
        self.rewards = RewardClient(token=token, deadline=deadline)
        self.replay = ReplayClient(token=token, deadline=deadline)
        self.router = RouterAdmin(token=token)
        self.rollouts = RolloutClient(
            token=token,
            vocab_size=vocab_size,
            max_concurrency=settings.generation_concurrency,
            deadline_seconds=settings.generation_deadline_seconds,
            seed_each_completion=settings.engine_deterministic,
        )
        self.maker = GroupMaker(settings, self.rollouts, self.rewards)
        self.evaluator = Evaluator(settings, self.data, self.rollouts, self.rewards)
        self.source: GroupSource | None = None
        self.collector: asyncio.Task[None] | None = None
        self._coming: asyncio.Task[Batch] | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Conductor:
        for client in (self.data, self.rewards, self.replay, self.router, self.rollouts):
            await self._stack.enter_async_context(client)
        deadline = self.settings.start_deadline_seconds
        try:
            await asyncio.gather(
                *(service.wait_healthy(deadline) for service in (self.data, self.rewards, self.replay))
            )
        except DependencyLostError as error:
            raise NeverReadyError(str(error)) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (self.collector, self._coming):
            if task is not None:
                task.cancel()
        await self._stack.aclose()

    async def describe_data(self) -> DataStats:
        """What there is to train on."""
        return await self.data.stats()

    async def describe_components(self) -> dict[Task, ComponentRecord]:
        """Ask the services what they run with."""
        clients = (self.data, self.rewards, self.replay)
        records = await asyncio.gather(*(client.settings() for client in clients))
        return {client.service: record for client, record in zip(clients, records, strict=True)}

    async def start_source(self, cursor: Cursor) -> None:
        """Starts the source of groups; in asynchronous mode with a collector beside the trainer, unless it is
        elsewhere."""
        if self.settings.mode is Mode.SYNC:
            self.source = SynchronousSource(self.settings, self.data, self.maker, self.replay, cursor)
            return
        if self.settings.collector_in_process:
            self.collector = asyncio.create_task(Collector(self.settings, self.data, self.maker, self.replay).run())
        self.source = AsynchronousSource(self.settings, self.data, self.replay, self.collector)

    async def next_batch(self, policy_version: int, is_there: IsThere) -> Batch | None:
        """The groups of the next step; empty when the prompts are used up.

        None once ``is_there`` says that the version has gone from the shared volume, because a worker that comes back
        would wait for it. The groups are still being made then; the next call goes on waiting for them.
        """
        assert self.source is not None
        if self._coming is None:
            self._coming = asyncio.create_task(self.source.next(policy_version))
        try:
            while not self._coming.done():
                await asyncio.wait({self._coming}, timeout=VERSION_POLL_SECONDS)
                if not self._coming.done() and not await in_background(is_there):
                    return None
        except asyncio.CancelledError:
            self._coming.cancel()
            raise
        coming, self._coming = self._coming, None
        return coming.result()

    async def sample_replay(self, step: int, policy_version: int, batch: Batch) -> list[SampledGroup]:
        """Groups for the additional update of the step."""
        return await sample_groups(self.settings, self.replay, step, policy_version, batch.groups)

    async def finish_step(self, priorities: dict[str, float]) -> None:
        """Records what was trained on."""
        assert self.source is not None
        await self.source.trained()
        if priorities:
            await self.replay.update_priorities(priorities)

    async def save_replay(self, label: str) -> None:
        """Remembers the replay buffer's contents and priorities under a checkpoint's name."""
        await self.replay.save_snapshot(label)

    async def restore_replay(self, label: str) -> bool:
        """Takes the replay buffer back to a checkpoint; False when it does not know it, having lost its disk."""
        try:
            await self.replay.restore_snapshot(label)
        except RequestRefusedError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def forget_replay(self, label: str) -> None:
        """Lets the replay buffer forget a checkpoint's contents."""
        await self.replay.drop_snapshot(label)

    async def wait_for_workers(self, deadline_seconds: float) -> None:
        """Waits until the router has MIN_WORKERS rollout workers.

        Raises:
            NeverReadyError: it has fewer after the deadline.
        """
        workers: list[str] = []
        reason = "the router did not answer"
        try:
            async with asyncio.timeout(deadline_seconds):
                while len(workers) < self.settings.min_workers:
                    await asyncio.sleep(WORKER_POLL_SECONDS)
                    try:
                        workers = await self.router.workers()
                        reason = f"{len(workers)} are registered"
                    except DependencyLostError as error:
                        reason = str(error)
        except TimeoutError:
            raise NeverReadyError(
                f"rollout-server: not {self.settings.min_workers} workers (MIN_WORKERS) behind the router after "
                f"{deadline_seconds:g} s: {reason}; see the rollout-server's log"
            ) from None
