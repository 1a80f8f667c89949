"""What both transports share: updating every worker at once, checking versions, dropping those that failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from prometheus_client import Counter

from services.errors import DependencyLostError
from services.logs import get_logger
from services.rollout_control import RouterControl, WorkerControl, WorkerRefusedError
from trainer.config import TrainerSettings

log = get_logger(__name__)

WORKERS_DROPPED = Counter("trainer_workers_dropped", "Rollout workers removed from the routing for a failed update.")

WorkerUpdate = Callable[[WorkerControl, int], Awaitable[None]]
"""Brings one worker, given with its index among the workers, to the new version."""


async def update_workers(settings: TrainerSettings, urls: Sequence[str], version: int, update: WorkerUpdate) -> int:
    """Runs ``update`` on every worker at once and removes from the routing those that do not serve ``version`` then.

    Args:
        settings: deadline, token and the least number of workers.
        urls: the workers.
        version: what they are to serve.
        update: brings one worker to the version.

    Returns:
        How many serve it.

    Raises:
        DependencyLostError: fewer than MIN_WORKERS do.
    """

    async def one(index: int, url: str) -> bool:
        async with WorkerControl(url, token=settings.token) as worker:
            try:
                async with asyncio.timeout(settings.publish_deadline_seconds):
                    await update(worker, index)
                    served = await worker.version()
            except (WorkerRefusedError, DependencyLostError, TimeoutError) as error:
                log.warning("worker not updated", url=url, policy_version=version, reason=str(error) or "timed out")
                return False
        if served != version:
            log.warning("worker serves another version", url=url, policy_version=version, served=served)
        return served == version

    updated = await asyncio.gather(*(one(index, url) for index, url in enumerate(urls)))
    failed = [url for url, ok in zip(urls, updated, strict=True) if not ok]
    if failed:
        await drop_workers(settings, failed)
    left = sum(updated)
    if left < settings.min_workers:
        raise DependencyLostError(
            f"policy version {version}: {left} of {len(urls)} rollout workers serve it, MIN_WORKERS is "
            f"{settings.min_workers}; see the rollout-server's log"
        )
    return left


async def drop_workers(settings: TrainerSettings, urls: Sequence[str]) -> None:
    """Takes workers out of the routing; their launchers bring them up to date and back."""
    WORKERS_DROPPED.inc(len(urls))
    async with RouterControl(token=settings.token) as router:
        for url in urls:
            await router.remove(url)


async def registered_workers(settings: TrainerSettings) -> list[str]:
    """URLs of the workers that the router knows."""
    async with RouterControl(token=settings.token) as router:
        return await router.workers()


@asynccontextmanager
async def paused(worker: WorkerControl) -> AsyncIterator[None]:
    """Generations in flight stand still within it, and go on with the new weights after."""
    await worker.pause("in_place")
    try:
        yield
    finally:
        await worker.resume()
