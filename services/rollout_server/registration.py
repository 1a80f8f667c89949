"""Keeps one node's worker in the router's list exactly while it serves what it should.

The trainer updates every registered worker itself and takes one that failed out of the routing. Everything else is
here: whatever the reason for which the worker is not registered (it is new, its engine died, its update failed, the
router was restarted), it loads the newest published version from the shared volume and is registered again. Being
registered anew also makes the router's cache-aware policy send it traffic.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from services.clients.rollout_admin import RouterAdmin, WorkerAdmin, WorkerRefusedError
from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.core.tasks import in_background, run_until_first_ends
from services.http.client import RequestRefusedError
from services.rollout_server.engines import FIRST_VERSION
from services.rollout_server.settings import RolloutSettings
from services.rollout_server.supervisor import Supervised
from services.weights.policy_store import PolicyStore, PublishedPolicy

log = get_logger(__name__)

POLL_SECONDS = 0.5
CATCH_UP_TRIES = 5
REGISTER_SECONDS = 60.0
FORGOTTEN_SECONDS = 5.0
"""The router looks at a worker for a second or two before it lists it."""
AT_ONCE_SECONDS = 2.0
VOLUME_SECONDS = 30.0
"""Reading a directory's names on a shared volume that is well takes milliseconds."""


class WorkerKeeper:
    """The part of the launcher that looks after one worker."""

    def __init__(self, settings: RolloutSettings, url: str, router: Endpoint, engine: Callable[[], Supervised]) -> None:
        self.settings = settings
        self.url = url
        self.store = PolicyStore(settings.policy_dir)
        self._router_endpoint = router
        self._engine = engine
        self._newest_seen = -1
        self._fresh = True
        """Whether the engine has the weights that it started with."""
        self._was_registered = False
        self._removals = 0
        """How often the worker was found to be taken out of the routing while its engine ran."""

    async def run(self) -> None:
        """Keeps the worker until cancelled.

        Raises:
            DependencyLostError: the router or the shared volume is gone for good.
            ConfigurationError: the trainer seems to publish to another volume.
        """
        async with (
            # It may load a version for as long as its first weights.
            WorkerAdmin(self.url, self.settings.token, timeout=self.settings.engine_start_seconds) as worker,
            RouterAdmin(self._router_endpoint, self.settings.token) as router,
        ):
            start = 0
            while True:
                await self._engine().wait_for_start(after=start)
                start = self._engine().starts
                if await self._wait_until_up(worker, start):
                    self._fresh = True
                    await run_until_first_ends(self._keep(worker, router, start), self._watch(worker, start))

    async def withdraw(self) -> None:
        """Takes the worker out of the routing, before its engine is started again with its first weights.

        Raises:
            DependencyLostError: the router does not answer.
        """
        if not self._was_registered:
            return
        end = time.monotonic() + self.settings.rollout_lost_seconds
        async with RouterAdmin(self._router_endpoint, self.settings.token) as router:
            while not await router.is_healthy():
                if time.monotonic() > end:
                    raise DependencyLostError(
                        f"the router did not answer for {self.settings.rollout_lost_seconds:g} s; see node 0's log"
                    )
                await asyncio.sleep(POLL_SECONDS)
            await router.remove(self.url)

    async def withdraw_at_once(self) -> None:
        """Takes the worker out of the routing if the router answers now: at this node's start and end."""
        async with RouterAdmin(self._router_endpoint, self.settings.token) as router:
            try:
                async with asyncio.timeout(AT_ONCE_SECONDS):
                    if await router.is_healthy():
                        await router.remove(self.url)
            except (DependencyLostError, TimeoutError) as error:
                log.warning("worker not withdrawn", reason=str(error) or "timed out")

    async def _wait_until_up(self, worker: WorkerAdmin, start: int) -> bool:
        """True when the engine answers; False when it ended before, or was killed since it took too long."""
        end = time.monotonic() + self.settings.engine_start_seconds
        log.info("waiting for the engine", url=self.url, seconds=self.settings.engine_start_seconds)
        while self._runs(start):
            if await worker.is_healthy():
                self._engine().was_healthy = True
                return True
            if time.monotonic() > end:
                log.error("engine does not answer: killed", url=self.url, seconds=self.settings.engine_start_seconds)
                self._engine().kill()
                break
            await asyncio.sleep(POLL_SECONDS / 5)
        return False

    async def _watch(self, worker: WorkerAdmin, start: int) -> None:
        """Kills an engine that runs and does not answer; returns when it has ended."""
        answered = time.monotonic()
        while self._runs(start):
            if await worker.is_healthy():
                answered = time.monotonic()
            elif time.monotonic() - answered > self.settings.engine_hang_seconds and self._runs(start):
                log.error("engine hangs: killed", seconds=self.settings.engine_hang_seconds)
                self._engine().kill()
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _keep(self, worker: WorkerAdmin, router: RouterAdmin, start: int) -> None:
        """Looks after a worker that is up, until its engine ends.

        Raises:
            DependencyLostError: it could not be registered for ``rollout_lost_seconds``.
            ConfigurationError: the trainer seems to publish to another volume.
        """
        registered_at = time.monotonic()
        was_registered = False
        stale_since: float | None = None
        refusals, told = 0, ""
        while self._runs(start):
            try:
                if not await router.is_healthy():
                    raise DependencyLostError("the router does not answer")
                registered = self.url in await router.workers()
                self._removals += was_registered and not registered
                was_registered = registered
                stale_since = await self._stale_since(worker, stale_since) if registered else None
                if not registered or self._is_too_stale(stale_since):
                    await self._join(worker, router)
                    was_registered, stale_since = True, None
                registered_at = time.monotonic()
                refusals, told = 0, ""
            except (DependencyLostError, WorkerRefusedError) as error:
                if not self._runs(start):
                    break
                if str(error) != told:
                    told = str(error)
                    log.warning("worker not registered", reason=told)
                refusals += isinstance(error, WorkerRefusedError)
                if refusals >= CATCH_UP_TRIES:
                    log.error("engine refuses what is published: killed")
                    self._engine().kill()
                    break
                if time.monotonic() - registered_at > self.settings.rollout_lost_seconds:
                    raise DependencyLostError(
                        f"worker {self.url} could not be registered for {self.settings.rollout_lost_seconds:g} s: "
                        f"{told}"
                    ) from error
            await asyncio.sleep(POLL_SECONDS * (1 + refusals))

    def _is_too_stale(self, since: float | None) -> bool:
        return since is not None and time.monotonic() - since > self.settings.engine_stale_seconds

    async def _stale_since(self, worker: WorkerAdmin, since: float | None) -> float | None:
        """Since when the registered worker serves an older version than the newest; None when it does not."""
        newest = await self._newest()
        if newest is None:
            return None
        version = await worker.version()
        if version is not None and version >= newest.version:
            return None
        return time.monotonic() if since is None else since

    async def _join(self, worker: WorkerAdmin, router: RouterAdmin) -> None:
        """Brings the worker to the newest version and registers it.

        Published meanwhile, a version may have been sent to the workers registered before this one: after registering,
        the newest is looked up again.
        """
        for _ in range(CATCH_UP_TRIES):
            await router.remove(self.url)
            version = await self._catch_up(worker)
            self._was_registered = True
            await self._register(router)
            newest = await self._newest()
            if newest is None or newest.version <= version:
                log.info("worker registered", url=self.url, policy_version=version)
                return
        raise WorkerRefusedError(f"{self.url}: versions are published faster than it can load them")

    async def _catch_up(self, worker: WorkerAdmin) -> int:
        """Loads the newest published version, whatever the worker says that it serves; returns the version.

        A worker whose update failed half-way may have weights of two versions, so its word is not enough.
        """
        newest = await self._newest()
        if newest is None:
            self._check_volume()
        path, version = (newest.path, newest.version) if newest else (self.settings.model_name, FIRST_VERSION)
        if not (self._fresh and await worker.version() == version):
            started = time.monotonic()
            self._fresh = False
            # What is in flight was begun with weights of which we cannot be sure; clients ask for it again elsewhere.
            # Retracted first, since SGLang never gets to abort what is paused in place.
            await worker.pause("retract")
            await worker.pause("abort")
            await self._close_update(worker)
            async with self._held(newest):
                await worker.update_from_disk(path, version)
            await worker.resume()
            log.info("worker caught up", policy_version=version, seconds=time.monotonic() - started)
        served = await worker.version()
        if served != version:
            raise WorkerRefusedError(
                f"worker {self.url} loaded policy version {version} but says that it serves {served}"
            )
        return version

    @asynccontextmanager
    async def _held(self, policy: PublishedPolicy | None) -> AsyncIterator[None]:
        """Keeps a version from being pruned while it is loaded: SGLang dies of files that vanish."""
        if policy is None:
            yield
            return
        try:
            async with asyncio.timeout(VOLUME_SECONDS):
                hold = await in_background(partial(self.store.hold, policy.version))
        except (OSError, TimeoutError) as error:
            raise DependencyLostError(
                f"cannot hold policy version {policy.version} in {self.store.policy_dir} "
                f"({str(error) or 'timed out'}); is SHARED_DIR mounted for writing?"
            ) from error
        try:
            yield
        finally:
            # One that stays counts no more after a while.
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(VOLUME_SECONDS):
                    await in_background(partial(self.store.release, hold))

    async def _close_update(self, worker: WorkerAdmin) -> None:
        """Ends the broadcast that a trainer began and did not end: SGLang refuses the next one meanwhile."""
        try:
            await worker.end_update()
        except WorkerRefusedError as error:
            log.debug("no update to close", reason=str(error))

    def _check_volume(self) -> None:
        """For when nothing is published: makes sure that this node is not merely kept from seeing it.

        Raises:
            DependencyLostError: what was published is gone.
            ConfigurationError: the trainer seems to publish elsewhere.
        """
        if self._newest_seen >= 0:
            raise DependencyLostError(
                f"{self.store.policy_dir} held policy version {self._newest_seen} and is empty or missing now; is "
                f"SHARED_DIR still mounted?"
            )
        # It was taken out by a router that was restarted, or again and again by a trainer whose versions it misses.
        if self._removals > CATCH_UP_TRIES:
            raise ConfigurationError(
                f"worker {self.url} was taken out of the routing {self._removals} times while nothing is published in "
                f"{self.store.policy_dir}; is SHARED_DIR the same volume on this node as on the trainer's?"
            )

    async def _register(self, router: RouterAdmin) -> None:
        """Registers the worker and waits until the router, which looks at it first, sends it requests."""
        end = time.monotonic() + REGISTER_SECONDS
        told = -FORGOTTEN_SECONDS
        while self.url not in await router.healthy_workers():
            if time.monotonic() > end:
                raise DependencyLostError(f"the router did not list worker {self.url} within {REGISTER_SECONDS:g} s")
            # Once more if the router was restarted meanwhile: it has forgotten what it was told.
            if time.monotonic() - told >= FORGOTTEN_SECONDS and self.url not in await router.workers():
                await self._add(router)
                told = time.monotonic()
            await asyncio.sleep(POLL_SECONDS / 10)

    async def _add(self, router: RouterAdmin) -> None:
        try:
            await router.add(self.url)
        except RequestRefusedError as error:
            raise WorkerRefusedError(f"the router refuses worker {self.url}: {error.detail}") from error

    async def _newest(self) -> PublishedPolicy | None:
        """The newest published version.

        Raises:
            DependencyLostError: the shared volume cannot be read.
        """
        try:
            # A volume whose server is gone may block for ever: not in a thread that the launcher's end would wait for.
            async with asyncio.timeout(VOLUME_SECONDS):
                newest = await in_background(self.store.newest)
        except (OSError, TimeoutError) as error:
            raise DependencyLostError(
                f"cannot read {self.store.policy_dir} ({str(error) or 'timed out'}); is SHARED_DIR mounted?"
            ) from error
        if newest is not None:
            self._newest_seen = max(self._newest_seen, newest.version)
        return newest

    def _runs(self, start: int) -> bool:
        engine = self._engine()
        return engine.starts == start and engine.is_running
