"""What both transports share: updating every worker at once, checking versions, dropping those that failed.

A worker that was dropped is brought up to date and registered again by its launcher; the run waits for that only when
fewer than MIN_WORKERS are left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from prometheus_client import Counter

from services.clients.rollout_admin import RouterAdmin, WorkerAdmin, WorkerRefusedError
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.core.tasks import in_background
from trainer.config import TrainerSettings

log = get_logger(__name__)

WORKERS_DROPPED = Counter("trainer_workers_dropped", "Rollout workers removed from the routing for a failed update.")

POLL_SECONDS = 0.2
PROBE_SECONDS = 5.0

IsThere = Callable[[], bool]
"""Returns whether the version that workers wait for is on the shared volume; called in a thread."""


class VersionGoneError(DependencyLostError):
    """The version that workers wait for has gone from the shared volume."""


WorkerUpdate = Callable[[WorkerAdmin, int], Awaitable[None]]
"""Brings one worker, given with its index among the workers, to the new version."""


async def update_workers(
    settings: TrainerSettings,
    urls: Sequence[str],
    version: int,
    update: WorkerUpdate,
    is_there: IsThere = lambda: True,
) -> int:
    """Runs ``update`` on every worker at once and removes from the routing those that do not serve ``version`` then.

    If fewer than MIN_WORKERS are left, waits until the launchers have brought others up to date.

    Args:
        settings: deadline, token and the least number of workers.
        urls: the workers.
        version: what they are to serve.
        update: brings one worker to the version.
        is_there: whether launchers find the version on the shared volume.

    Returns:
        How many serve it.

    Raises:
        VersionGoneError: fewer than MIN_WORKERS do, and it is not there.
        DependencyLostError: fewer than MIN_WORKERS do, also after PUBLISH_DEADLINE_SECONDS more.
    """

    async def one(index: int, url: str) -> bool:
        async with worker_control(settings, url) as worker:
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
    if sum(updated) >= settings.min_workers:
        return sum(updated)

    async def up_to_date(registered: list[str]) -> list[str]:
        served = await asyncio.gather(*(_version_or_none(settings, url) for url in registered))
        return [url for url, number in zip(registered, served, strict=True) if number == version]

    left = await _wait_for_workers(settings, up_to_date, f"serve policy version {version}", is_there)
    return len(left)


def worker_control(settings: TrainerSettings, url: str) -> WorkerAdmin:
    """What speaks to a worker that has PUBLISH_DEADLINE_SECONDS for each answer."""
    return WorkerAdmin(url, token=settings.token, timeout=settings.publish_deadline_seconds)


async def drop_workers(settings: TrainerSettings, urls: Sequence[str]) -> None:
    """Takes workers out of the routing; their launchers bring them up to date and back."""
    WORKERS_DROPPED.inc(len(urls))
    async with RouterAdmin(token=settings.token) as router:
        for url in urls:
            await router.remove(url)


async def registered_workers(settings: TrainerSettings, is_there: IsThere = lambda: True) -> list[str]:
    """URLs of the workers that the router knows; waits until they are at least MIN_WORKERS.

    Raises:
        VersionGoneError: they are fewer, and the version that they could load is not there.
        DependencyLostError: they are fewer after PUBLISH_DEADLINE_SECONDS.
    """

    async def all_of_them(registered: list[str]) -> list[str]:
        return registered

    return await _wait_for_workers(settings, all_of_them, "are registered with the router", is_there)


async def _wait_for_workers(
    settings: TrainerSettings, select: Callable[[list[str]], Awaitable[list[str]]], what: str, is_there: IsThere
) -> list[str]:
    """Waits until ``select`` keeps at least MIN_WORKERS of the registered workers; ``what`` says which it keeps."""
    selected: list[str] = []
    try:
        async with asyncio.timeout(settings.publish_deadline_seconds), RouterAdmin(token=settings.token) as router:
            while True:
                selected = await select(await router.workers())
                if len(selected) >= settings.min_workers:
                    return selected
                if not await in_background(is_there):
                    raise VersionGoneError(f"the newest policy version has gone from {settings.policy_dir}")
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise DependencyLostError(
            f"{len(selected)} rollout workers {what} after {settings.publish_deadline_seconds:g} s, MIN_WORKERS is "
            f"{settings.min_workers}; see the rollout-server's log"
        ) from None


async def _version_or_none(settings: TrainerSettings, url: str) -> int | None:
    async with WorkerAdmin(url, token=settings.token, timeout=PROBE_SECONDS) as worker:
        try:
            return await worker.version()
        except (WorkerRefusedError, DependencyLostError):
            return None


@asynccontextmanager
async def held(worker: WorkerAdmin, settings: TrainerSettings) -> AsyncIterator[None]:
    """Nothing is generated within it.

    When it fails the worker stays paused: its weights may be of two versions, and what waits in it is not to be
    computed with them. Its launcher ends the pause when it has brought it up to date.
    """
    await worker.hold(finishes_requests=not settings.publish_in_place)
    yield
    await worker.resume()
