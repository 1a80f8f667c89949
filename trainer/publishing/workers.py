"""The part that both transports share: update all workers at once, check their versions, drop those that failed.

The launcher of a dropped worker brings it up to date and registers it again. The run waits for that only when fewer
than MIN_WORKERS workers are left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from prometheus_client import Counter

from services.clients.rollout_admin import RouterAdmin, WorkerAdmin, WorkerRefusedError
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.core.tasks import in_background
from trainer.config import TrainerSettings

log = get_logger(__name__)

WORKERS_DROPPED = Counter("trainer_workers_dropped", "Rollout workers removed from the routing for a failed update.")

PUBLISH_SECONDS = 600.0
"""Longest wait for a worker to take a version, and for workers to come back. Even a slow volume (0.3 GB/s) gives a
worker a model of 70B parameters, 140 GB, in less."""

SLEEP_SECONDS = 60.0
"""Longest wait for each answer of a worker that gives its memory away."""
POLL_SECONDS = 0.2
PROBE_SECONDS = 5.0

IsThere = Callable[[], bool]
"""Returns True while the version that workers wait for is on the shared volume; called in a thread."""

WorkerUpdate = Callable[[WorkerAdmin], Awaitable[None]]
"""Brings one worker to the new version."""


class VersionGoneError(DependencyLostError):
    """The loss of the version that workers wait for from the shared volume."""


async def update_workers(
    settings: TrainerSettings,
    urls: Sequence[str],
    version: int,
    update: WorkerUpdate,
    is_there: IsThere = lambda: True,
) -> int:
    """Update all workers at once, drop those that do not serve ``version`` afterwards, and return how many do.

    With fewer than MIN_WORKERS left, wait until the launchers have brought others up to date.

    Args:
        settings: MIN_WORKERS and the token.
        urls: the workers.
        version: the version to serve.
        update: brings one worker to the version.
        is_there: returns True while launchers find the version on the shared volume.

    Raises:
        VersionGoneError: fewer than MIN_WORKERS serve the version, and the volume has lost it.
        DependencyLostError: fewer than MIN_WORKERS serve the version, even after PUBLISH_SECONDS more.
    """
    updated = await asyncio.gather(*(_is_updated(settings, url, version, update) for url in urls))
    failed = [url for url, ok in zip(urls, updated, strict=True) if not ok]
    if failed:
        await drop_workers(settings, failed)
    if sum(updated) >= settings.min_workers:
        return sum(updated)

    async def up_to_date(registered: list[str]) -> list[str]:
        served = await asyncio.gather(*(_version_or_none(settings, url) for url in registered))
        return [url for url, number in zip(registered, served, strict=True) if number == version]

    return len(await _wait_for_workers(settings, up_to_date, f"serve policy version {version}", is_there))


async def _is_updated(settings: TrainerSettings, url: str, version: int, update: WorkerUpdate) -> bool:
    """Update one worker; return True when it serves ``version`` afterwards."""
    try:
        async with worker_admin(settings, url) as worker, asyncio.timeout(PUBLISH_SECONDS):
            await update(worker)
            served = await worker.version()
    except (WorkerRefusedError, DependencyLostError, TimeoutError) as error:
        log.warning("worker not updated", url=url, policy_version=version, reason=str(error) or "timed out")
        return False
    if served != version:
        log.warning("worker serves another version", url=url, policy_version=version, served=served)
    return served == version


def worker_admin(settings: TrainerSettings, url: str) -> WorkerAdmin:
    """Return a client of a worker that gives it PUBLISH_SECONDS for each answer."""
    return WorkerAdmin(url, token=settings.token, timeout=PUBLISH_SECONDS)


async def put_workers_to_sleep(settings: TrainerSettings) -> None:
    """Have every registered worker give its GPU's memory away; ``WorkerAdmin.hold`` wakes it for the next version.

    A worker that does not fall asleep keeps its memory, and the step may do without.

    Raises:
        DependencyLostError: the router does not answer.
    """

    async def put_to_sleep(url: str) -> None:
        async with WorkerAdmin(url, token=settings.token, timeout=SLEEP_SECONDS) as worker:
            try:
                await worker.sleep()
            except (WorkerRefusedError, DependencyLostError) as error:
                log.warning("worker does not sleep and keeps its memory", url=url, reason=str(error))

    async with RouterAdmin(token=settings.token) as router:
        await asyncio.gather(*map(put_to_sleep, await router.workers()))


async def drop_workers(settings: TrainerSettings, urls: Sequence[str]) -> None:
    """Remove workers from the routing; their launchers bring them up to date and register them again."""
    WORKERS_DROPPED.inc(len(urls))
    async with RouterAdmin(token=settings.token) as router:
        for url in urls:
            await router.remove(url)


async def registered_workers(settings: TrainerSettings, is_there: IsThere = lambda: True) -> list[str]:
    """Return the URLs of the workers that the router knows, once they are at least MIN_WORKERS.

    Raises:
        VersionGoneError: they are fewer, and the volume has lost the version that others could load.
        DependencyLostError: they are fewer after PUBLISH_SECONDS.
    """

    async def everyone(registered: list[str]) -> list[str]:
        return registered

    return await _wait_for_workers(settings, everyone, "are registered with the router", is_there)


async def _wait_for_workers(
    settings: TrainerSettings, select: Callable[[list[str]], Awaitable[list[str]]], state: str, is_there: IsThere
) -> list[str]:
    """Wait until ``select`` keeps at least MIN_WORKERS registered workers; ``state`` describes them in the error."""
    selected: list[str] = []
    try:
        async with asyncio.timeout(PUBLISH_SECONDS), RouterAdmin(token=settings.token) as router:
            while True:
                selected = await select(await router.workers())
                if len(selected) >= settings.min_workers:
                    return selected
                if not await in_background(is_there):
                    raise VersionGoneError(f"the newest policy version has gone from {settings.policy_dir}")
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise DependencyLostError(
            f"{len(selected)} rollout workers {state} after {PUBLISH_SECONDS:g} s, MIN_WORKERS is "
            f"{settings.min_workers}; see the rollout-server's log"
        ) from None


async def _version_or_none(settings: TrainerSettings, url: str) -> int | None:
    async with WorkerAdmin(url, token=settings.token, timeout=PROBE_SECONDS) as worker:
        try:
            return await worker.version()
        except (WorkerRefusedError, DependencyLostError):
            return None
