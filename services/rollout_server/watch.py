"""A watch over an engine whose process runs: kill it when its scheduler hangs, and wake it when its trainer is gone.

An engine's HTTP process may answer /health by itself, also when the scheduler or its GPU hangs. The watch therefore
asks the scheduler now and then, and kills an engine whose scheduler is silent. A scheduler that generates for others
answers at once, so the check costs a busy engine nothing.

With ENGINE_SLEEPS, the trainer wakes the engine with its next publication, and a restarted trainer with its first one.
If the trainer is gone, the watch wakes the engine, so that requests of others do not wait for ever.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import sleep
from collections.abc import Awaitable, Callable

from services.core.endpoints import Task, endpoint
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.core.supervisor import HANG_SECONDS, SupervisedProcess
from services.engines.engine import Engine, WorkerRefusedError
from services.engines.settings import RolloutSettings
from services.http.client import HttpClient

log = get_logger(__name__)

UPDATE_SECONDS = 600.0
"""Longest silence while weights change, as long as the trainer waits for a worker that loads a version."""
LEAST_FAILURES = 2
"""Checks in a row that fail before the engine is killed."""
SLEEP_POLL_SECONDS = 5.0
"""The longest time between two questions to a sleeping engine."""


async def watch_engine(
    settings: RolloutSettings, worker: Engine, engine: SupervisedProcess, is_updating: Callable[[], Awaitable[bool]]
) -> None:
    """Watch every start of an engine, from its first answer on, until cancelled.

    A check of the scheduler takes place every sixth of HANG_SECONDS and fails after half of them. So a silent engine is
    killed within 1.5 times HANG_SECONDS, or UPDATE_SECONDS later than that while its weights seem to change. A sleeping
    engine wakes when the trainer has not answered for ``stale_seconds`` of the settings.

    Args:
        settings: the limits of time, and whether the engine sleeps.
        worker: the engine's routes.
        engine: the engine's process.
        is_updating: returns whether the engine's weights may be changing now, during which it is silent.
    """
    start = 0
    while True:
        start = await engine.wait_until_healthy(after=start)
        watches = [_kill_if_hung(worker, engine, is_updating, start)]
        watches += [_wake_if_alone(worker, engine, settings.stale_seconds, start)] if settings.engine_sleeps else []
        await asyncio.gather(*watches)


async def _kill_if_hung(
    worker: Engine, engine: SupervisedProcess, is_updating: Callable[[], Awaitable[bool]], start: int
) -> None:
    hang_seconds = HANG_SECONDS
    answered = quiet_since = time.monotonic()
    failures = 0
    while engine.is_running(start):
        if await worker.scheduler_answers(hang_seconds / 2):
            answered = quiet_since = time.monotonic()
            failures = 0
        elif time.monotonic() - answered < UPDATE_SECONDS and await is_updating():
            quiet_since = time.monotonic()
        else:
            failures += 1
        quiet = time.monotonic() - quiet_since
        if failures >= LEAST_FAILURES and quiet > hang_seconds and engine.is_running(start):
            log.error("scheduler does not answer: engine killed", url=worker.url, seconds=round(quiet, 1))
            engine.kill()
            return
        await sleep(hang_seconds / 6)


async def _wake_if_alone(worker: Engine, engine: SupervisedProcess, lost_seconds: float, start: int) -> None:
    answered = time.monotonic()
    # The trainer's run page answers also while the trainer computes.
    async with HttpClient(endpoint(Task.TRAINER).url, service=Task.TRAINER.value) as trainer:
        while engine.is_running(start):
            await sleep(min(SLEEP_POLL_SECONDS, lost_seconds / 4))
            try:
                if not await worker.is_asleep() or await trainer.is_healthy():
                    answered = time.monotonic()
                elif time.monotonic() - answered > lost_seconds:
                    log.warning("engine woken: its trainer does not answer", url=worker.url)
                    await worker.wake()
                    await worker.resume()
            except (WorkerRefusedError, DependencyLostError) as error:
                log.warning("engine asleep or not: unknown", url=worker.url, reason=str(error))
