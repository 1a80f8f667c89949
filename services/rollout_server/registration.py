"""Keeps one node's worker in the router's list exactly while the worker serves the version that it should.

The trainer updates every registered worker itself and removes a worker whose update failed. This module does the rest:
whatever the reason for which the worker is not registered (it is new, its engine died, its update failed, the router
was restarted), it loads the newest published version from the shared volume and is registered again. The router then
gives it the requests of new routing keys as long as it has the fewest.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from services.core.endpoints import Task, endpoint
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.core.supervisor import SupervisedProcess
from services.core.tasks import in_background
from services.engines.engine import Engine, WorkerRefusedError, from_directory
from services.engines.proof import Evidence, UnprovenError, note_refusal, prove
from services.engines.router import RouterAdmin
from services.engines.settings import RolloutSettings
from services.http.client import HttpClient, RequestRefusedError
from services.rollout_server.watch import UPDATE_SECONDS
from services.weights.policy_store import FIRST_VERSION, PolicyStore, PublishedPolicy, is_adapter

T = TypeVar("T")
log = get_logger(__name__)

POLL_SECONDS = 0.5
WORKERS_A_POLL = 16
"""With more workers, each looks at the router's list less often, so that all together ask it as often as these do."""
LONGEST_POLL_SECONDS = 5.0
MAX_TRIES = 5
"""Versions loaded in a row before giving up, and refusals of an engine before it is killed."""
LISTED_SECONDS = 60.0
"""Longest time until the router lists a worker that was added to it."""
ADD_AGAIN_SECONDS = 5.0
"""Time after which a worker that the router does not list is added again; the router checks it for a second or two."""
WITHDRAW_SECONDS = 2.0
"""Longest time that the start and the end of a node spend on withdrawing its worker."""
VOLUME_SECONDS = 30.0
"""Longest time for an access to the shared volume, which takes milliseconds when the volume is well."""
PUBLICATION_SECONDS = 3 * UPDATE_SECONDS
"""Longest publication by a trainer that answers: it may write the version again, and engines pause and load."""


def poll_seconds(workers: int) -> float:
    """Return the pause after a look at the router's list of so many workers."""
    return min(POLL_SECONDS * max(workers / WORKERS_A_POLL, 1.0), LONGEST_POLL_SECONDS)


class WorkerRegistration:
    """The registration of one node's worker with the router."""

    def __init__(
        self, settings: RolloutSettings, worker: Engine, router: RouterAdmin, engine: SupervisedProcess
    ) -> None:
        self.store = PolicyStore(settings.policy_dir)
        self._settings = settings
        self._worker = worker
        self._url = worker.url
        self._log = log.bind(url=worker.url)
        self._router = router
        self._engine = engine
        self._newest_seen = -1
        self._has_first_weights = True
        """True while the engine has the weights that it started with."""
        self._was_added = False
        """True once the worker may have been in the router's list."""
        self._is_loading = False
        self._has_met_router = False
        """False while the router, which starts after the first engine, has never answered."""
        self._removals = 0
        """Number of times that the worker was found removed from the routing while its engine ran."""
        self._is_listed = False
        self._stale_since: float | None = None
        """The time, by time.monotonic, since which the registered worker serves an older version than the newest."""
        self._trainer_answered = 0.0

    async def run(self) -> None:
        """Keep the worker registered until cancelled.

        Raises:
            DependencyLostError: the router or the shared volume is gone for good.
            ConfigurationError: the trainer seems to publish to another volume.
        """
        start = 0
        while True:
            self._log.info("waiting for the engine", seconds=self._settings.engine_start_seconds)
            start = await self._engine.wait_until_healthy(after=start)
            self._has_first_weights, self._is_listed, self._stale_since = True, False, None
            await self._keep_registered(start)

    async def withdraw(self) -> None:
        """Remove the worker from the routing, before its engine is started again with its first weights.

        Raises:
            DependencyLostError: the router does not answer.
        """
        if self._was_added:
            await self._router.wait_healthy(self._settings.lost_seconds)
            await self._router.remove(self._url)

    async def withdraw_if_possible(self) -> None:
        """Remove the worker from the routing if the router answers now: at this node's start and end."""
        try:
            async with asyncio.timeout(WITHDRAW_SECONDS):
                if await self._router.is_healthy():
                    await self._router.remove(self._url)
        except (DependencyLostError, TimeoutError) as error:
            self._log.warning("worker not withdrawn", reason=str(error) or "timed out")

    async def is_updating(self) -> bool:
        """Return whether the worker's weights may be changing now: here, or because the trainer publishes a version."""
        if self._is_loading:
            return True
        try:
            begun, served = await self._on_volume("read", self.store.newest_begun), await self._worker.version()
        except (DependencyLostError, WorkerRefusedError):
            return False
        return begun is not None and (served is None or served < begun)

    async def _keep_registered(self, start: int) -> None:
        """Register the worker, and again whenever it is not listed or stale, until the engine of that start ends.

        Raises:
            DependencyLostError: it could not be registered for ``lost_seconds`` of the settings.
            ConfigurationError: the trainer seems to publish to another volume.
        """
        lost_seconds, registered_at = self._settings.lost_seconds, time.monotonic()
        refusals, logged, pause = 0, "", POLL_SECONDS
        while self._engine.is_running(start):
            try:
                pause = poll_seconds(await self._look())
                registered_at, refusals, logged = time.monotonic(), 0, ""
            except (DependencyLostError, WorkerRefusedError) as error:
                if not self._engine.is_running(start):
                    break
                if str(error) != logged:
                    logged = str(error)
                    if self._has_met_router:
                        self._log.warning("worker not registered", reason=logged)
                    else:
                        self._log.info("waiting for the router", seconds=lost_seconds)
                refusals += isinstance(error, WorkerRefusedError)
                if refusals >= MAX_TRIES:
                    self._log.error("engine refuses the published version: killed")
                    self._engine.kill()
                    break
                if time.monotonic() - registered_at > lost_seconds:
                    raise DependencyLostError(
                        f"worker {self._url} could not be registered for {lost_seconds:g} s: {logged}"
                    ) from error
            await asyncio.sleep(max(pause, POLL_SECONDS * (1 + refusals)))

    async def _look(self) -> int:
        """Register the worker if it is not listed, or stale for too long; return the number of listed workers."""
        if not await self._router.is_healthy():
            raise DependencyLostError("the router does not answer")
        self._has_met_router = True
        listed = {worker.url for worker in await self._router.workers()}
        was_listed, self._is_listed = self._is_listed, self._url in listed
        self._removals += was_listed and not self._is_listed
        is_stale = self._is_listed and await self._is_stale()
        self._stale_since = (self._stale_since or time.monotonic()) if is_stale else None
        if not self._is_listed or (self._stale_since and await self._is_overdue(self._stale_since)):
            await self._catch_up_and_register()
            self._is_listed, self._stale_since = True, None
        return len(listed)

    async def _is_stale(self) -> bool:
        """Return whether the worker serves an older version than the newest published one."""
        newest = await self._newest()
        if newest is None:
            return False
        version = await self._worker.version()
        return version is None or version < newest.version

    async def _is_overdue(self, stale_since: float) -> bool:
        """Return whether a worker that has been stale since that time gets the newest version from nobody else.

        A trainer that answers may be publishing it.
        """
        limit, now = self._settings.stale_seconds, time.monotonic()
        last = max(stale_since, self._trainer_answered)
        if now - last > limit / 2:  # so that one answer that is lost does not count
            async with HttpClient(endpoint(Task.TRAINER).url, service=Task.TRAINER.value) as trainer:
                if await trainer.is_healthy():
                    last = self._trainer_answered = now
        return now - last > limit or now - stale_since > max(limit, PUBLICATION_SECONDS)

    async def _catch_up_and_register(self) -> None:
        """Bring the worker to the newest version and register it.

        A version published meanwhile may have been sent only to the workers registered before this one, so the newest
        version is looked up again after the registration.
        """
        for _ in range(MAX_TRIES):
            await self._router.remove(self._url)
            version = await self._catch_up()
            self._was_added = True
            await self._register()
            newest = await self._newest()
            if newest is None or newest.version <= version:
                self._log.info("worker registered", policy_version=version)
                return
        raise WorkerRefusedError(f"{self._url}: versions are published faster than it can load them")

    async def _catch_up(self) -> int:
        """Load the newest published version, whatever version the worker reports, and return its number.

        A worker whose update failed half-way may hold weights of two versions, so its report is not enough.
        """
        newest = await self._newest()
        if newest is None:
            self._check_volume()
            delivery = from_directory(FIRST_VERSION, self._settings.model_name)
        else:
            has_adapter = await self._on_volume("read", lambda: is_adapter(newest.path))
            delivery = from_directory(newest.version, newest.path, is_adapter=has_adapter)
        # An adapter is never among the first weights, even if its version is the first.
        is_first = self._has_first_weights and not delivery.is_adapter
        if is_first and await self._worker.version() == delivery.version:
            with contextlib.suppress(UnprovenError):  # of a version 0 that is rounded, or an engine that is wrong
                await self._prove(newest, is_adapter=False)
                return delivery.version
        self._has_first_weights, self._is_loading = False, True
        try:
            async with self._held(newest):
                seconds = await self._worker.serve(delivery, "abort")
                await self._prove(newest, is_adapter=delivery.is_adapter)
        except UnprovenError as error:
            if newest is not None:
                refused = error
                await self._on_volume("write to", lambda: note_refusal(newest.path, refused))
            raise
        finally:
            self._is_loading = False
        self._log.info("worker caught up", policy_version=delivery.version, seconds=seconds)
        return delivery.version

    async def _prove(self, newest: PublishedPolicy | None, *, is_adapter: bool) -> None:
        """Prove that the engine serves the newest version; see ``services.engines.proof``."""
        if newest is not None:
            evidence = await self._on_volume("read", lambda: Evidence.read(newest.path))
            await prove(self._worker, newest.version, evidence, is_adapter=is_adapter)

    async def _register(self) -> None:
        """Add the worker to the router, and wait until the router, which checks it first, sends it requests."""
        added_at = -ADD_AGAIN_SECONDS
        try:
            async with asyncio.timeout(LISTED_SECONDS):
                while True:
                    listed = {worker.url: worker.is_healthy for worker in await self._router.workers()}
                    if listed.get(self._url):
                        return
                    # Again if the router was restarted meanwhile, since it has forgotten the worker.
                    is_due = time.monotonic() - added_at >= ADD_AGAIN_SECONDS
                    if is_due and self._url not in listed:
                        await self._router.add(self._worker)
                        added_at = time.monotonic()
                    await asyncio.sleep(POLL_SECONDS / 10)
        except RequestRefusedError as error:
            raise WorkerRefusedError(f"the router refuses worker {self._url}: {error.detail}") from error
        except TimeoutError as error:
            raise DependencyLostError(f"the router did not list {self._url} within {LISTED_SECONDS:g} s") from error

    def _check_volume(self) -> None:
        """Check, while nothing is published, that this node sees the volume to which the trainer publishes.

        Raises:
            DependencyLostError: the published versions are gone.
            ConfigurationError: the trainer seems to publish elsewhere.
        """
        if self._newest_seen >= 0:
            raise DependencyLostError(
                f"{self.store.policy_dir} held policy version {self._newest_seen} and is empty or missing now; is "
                f"SHARED_DIR still mounted?"
            )
        # A restarted router removes it once or twice, a trainer whose versions it misses again and again.
        if self._removals > MAX_TRIES:
            raise ConfigurationError(
                f"worker {self._url} was taken out of the routing {self._removals} times while nothing is published in "
                f"{self.store.policy_dir}; is SHARED_DIR the same volume on this node as on the trainer's?"
            )

    async def _newest(self) -> PublishedPolicy | None:
        newest = await self._on_volume("read", self.store.newest)
        if newest is not None:
            self._newest_seen = max(self._newest_seen, newest.version)
        return newest

    @asynccontextmanager
    async def _held(self, policy: PublishedPolicy | None) -> AsyncIterator[None]:
        """Keep a version from being pruned while it is loaded, because SGLang dies of files that vanish."""
        if policy is None:
            yield
            return
        action = f"hold policy version {policy.version} in"
        hold = await self._on_volume(action, lambda: self.store.hold(policy.version))
        try:
            yield
        finally:
            # A hold that stays expires after a while.
            with contextlib.suppress(DependencyLostError):
                await self._on_volume("release a hold in", lambda: self.store.release(hold))

    async def _on_volume(self, action: str, work: Callable[[], T]) -> T:
        """Return the result of ``work`` on the shared volume.

        Raises:
            DependencyLostError: it fails, or takes too long; the message names the action.
        """
        try:
            # A volume whose server is gone may block for ever, so the launcher must not wait for its thread at the end.
            async with asyncio.timeout(VOLUME_SECONDS):
                return await in_background(work)
        except (OSError, TimeoutError) as error:
            raise DependencyLostError(
                f"cannot {action} {self.store.policy_dir} ({str(error) or 'timed out'}); is SHARED_DIR mounted?"
            ) from error
