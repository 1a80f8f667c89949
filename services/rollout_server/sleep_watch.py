"""A watch over an engine that sleeps while the trainer uses its GPU (ENGINE_SLEEPS).

The trainer wakes the engine with its next publication, and a restarted trainer with its first one. This watch wakes an
engine whose trainer is gone, so that requests of others do not wait for ever.
"""

from __future__ import annotations

import time
from asyncio import sleep

from services.clients.rollout_admin import WorkerAdmin, WorkerRefusedError
from services.core.endpoints import Task, endpoint
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.http.client import HttpClient
from services.rollout_server.supervisor import SupervisedProcess

log = get_logger(__name__)

POLL_SECONDS = 5.0
"""The longest time between two questions."""


class SleepWatch:
    """The watch over one engine's sleep."""

    def __init__(self, worker: WorkerAdmin, engine: SupervisedProcess, *, lost_seconds: float) -> None:
        """Make a watch.

        Args:
            worker: the engine's routes.
            engine: the engine's process.
            lost_seconds: a sleeping engine wakes when the trainer has not answered for that long.
        """
        self._worker = worker
        self._engine = engine
        self._lost_seconds = lost_seconds

    async def run(self) -> None:
        """Watch every start of the engine until cancelled."""
        start = 0
        # The trainer's run page answers also while the trainer computes.
        async with HttpClient(endpoint(Task.TRAINER).url, service=Task.TRAINER.value) as trainer:
            while True:
                start = await self._engine.wait_until_healthy(after=start)
                await self._watch(start, trainer)

    async def _watch(self, start: int, trainer: HttpClient) -> None:
        answered = time.monotonic()
        while self._engine.is_running(start):
            await sleep(min(POLL_SECONDS, self._lost_seconds / 4))
            try:
                if not await self._worker.is_asleep() or await trainer.is_healthy():
                    answered = time.monotonic()
                elif time.monotonic() - answered > self._lost_seconds:
                    log.warning("engine woken: its trainer does not answer", url=self._worker.url)
                    await self._worker.wake()
                    await self._worker.resume()
            except (WorkerRefusedError, DependencyLostError) as error:
                log.warning("engine asleep or not: unknown", url=self._worker.url, reason=str(error))
