"""A watch over the part of SGLang that computes.

SGLang's HTTP process answers /health by itself, also when the scheduler or its GPU hangs. This watch therefore has the
scheduler generate a token now and then, by /health_generate, and kills an engine whose scheduler is silent. A scheduler
that generates for others answers at once, so the check costs a busy engine nothing.
"""

from __future__ import annotations

import time
from asyncio import sleep
from collections.abc import Awaitable, Callable

from services.clients.rollout_admin import WorkerAdmin
from services.core.logs import get_logger
from services.rollout_server.supervisor import SupervisedProcess

log = get_logger(__name__)

UPDATE_SECONDS = 600.0
"""Longest silence while weights change, as long as the trainer waits for a worker that loads a version."""
LEAST_FAILURES = 2
"""Checks in a row that fail before the engine is killed."""


class SchedulerWatch:
    """The watch over one engine's scheduler.

    A check takes place every sixth of ``hang_seconds`` and fails after half of them. So a silent engine is killed
    within 1.5 times ``hang_seconds``, or UPDATE_SECONDS later than that while its weights seem to change.
    """

    def __init__(
        self,
        worker: WorkerAdmin,
        engine: SupervisedProcess,
        *,
        hang_seconds: float,
        is_updating: Callable[[], Awaitable[bool]],
    ) -> None:
        """Make a watch.

        Args:
            worker: the engine's routes.
            engine: the engine's process.
            hang_seconds: a scheduler that is silent for longer hangs.
            is_updating: returns whether the engine's weights may be changing now, during which it is silent.
        """
        self._worker = worker
        self._engine = engine
        self._hang_seconds = hang_seconds
        self._is_updating = is_updating

    async def run(self) -> None:
        """Watch every start of the engine, from its first answer on, until cancelled."""
        start = 0
        while True:
            start = await self._engine.wait_until_healthy(after=start)
            await self._watch(start)

    async def _watch(self, start: int) -> None:
        answered = quiet_since = time.monotonic()
        failures = 0
        while self._engine.is_running(start):
            if await self._worker.scheduler_answers(self._hang_seconds / 2):
                answered = quiet_since = time.monotonic()
                failures = 0
            elif time.monotonic() - answered < UPDATE_SECONDS and await self._is_updating():
                quiet_since = time.monotonic()
            else:
                failures += 1
            quiet = time.monotonic() - quiet_since
            if failures >= LEAST_FAILURES and quiet > self._hang_seconds and self._engine.is_running(start):
                log.error("scheduler does not answer: engine killed", url=self._worker.url, seconds=round(quiet, 1))
                self._engine.kill()
                return
            await sleep(self._hang_seconds / 6)
