"""Publishes policy versions: from the trainer's shards into every rollout worker, verified by version.

A worker that does not take a version is removed from the routing; its node's launcher loads the newest version from the
shared volume and registers it again. So every version is on the volume, whatever the transport.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import torch
from prometheus_client import Counter
from services.policy_store import PolicyStore
from services.rollout_control import RouterControl, WorkerControl, WorkerRefusedError

from services.errors import DependencyLostError
from services.logs import get_logger
from trainer.config import PublishedType, TrainerSettings
from trainer.distributed import Ranks
from trainer.policy import Policy, save_pretrained
from trainer.service_thread import ServiceThread

log = get_logger(__name__)

WORKERS_DROPPED = Counter("trainer_workers_dropped", "Rollout workers removed from the routing for a failed update.")


class Publisher(Protocol):
    """Makes the policy in training what the rollout workers serve."""

    def publish(self, version: int) -> dict[str, float]:
        """Publishes as ``version``; a collective. Returns seconds and counts by metric name.

        Raises:
            DependencyLostError: fewer than MIN_WORKERS workers serve the version.
        """


class DiskPublisher:
    """Through versioned directories on the shared volume."""

    def __init__(self, settings: TrainerSettings, policy: Policy, ranks: Ranks, services: ServiceThread | None) -> None:
        self.settings = settings
        self.policy = policy
        self.ranks = ranks
        self.services = services
        self.store = PolicyStore(settings.policy_dir)

    def publish(self, version: int) -> dict[str, float]:
        """See Publisher."""
        directory = self.store.begin(version) if self.ranks.is_main else self.settings.policy_dir
        save_pretrained(self.policy, self.settings, self.ranks, directory, published_dtype(self.settings))
        if not self.ranks.is_main:
            return {}
        self.store.commit(version)
        self.store.prune(self.settings.published_versions_kept)
        assert self.services is not None
        workers = self.services.call(self._update_workers(version), self.settings.publish_deadline_seconds + 60)
        return {"workers": float(workers)}

    async def _update_workers(self, version: int) -> int:
        token = self.settings.token
        async with RouterControl(token=token) as router:
            urls = await router.workers()
            updated = await asyncio.gather(*(self._update_worker(url, version) for url in urls))
            for url, is_updated in zip(urls, updated, strict=True):
                if not is_updated:
                    WORKERS_DROPPED.inc()
                    await router.remove(url)
        left = sum(updated)
        if left < self.settings.min_workers:
            raise DependencyLostError(
                f"policy version {version}: {left} of {len(urls)} rollout workers serve it, MIN_WORKERS is "
                f"{self.settings.min_workers}; see the rollout-server's log"
            )
        return left

    async def _update_worker(self, url: str, version: int) -> bool:
        """True when the worker serves ``version`` afterwards."""
        async with WorkerControl(url, token=self.settings.token) as worker:
            try:
                async with asyncio.timeout(self.settings.publish_deadline_seconds):
                    if self.settings.publish_in_place:
                        await self._update_in_place(worker, version)
                    else:
                        await worker.update_from_disk(self.store.path(version), version)
                    served = await worker.version()
            except (WorkerRefusedError, DependencyLostError, TimeoutError) as error:
                log.warning("worker not updated", url=url, policy_version=version, reason=str(error) or "timed out")
                return False
        if served != version:
            log.warning("worker serves another version", url=url, policy_version=version, served=served)
        return served == version

    async def _update_in_place(self, worker: WorkerControl, version: int) -> None:
        await worker.pause("in_place")
        try:
            await worker.update_from_disk(self.store.path(version), version, flush_cache=False)
        finally:
            await worker.resume()


def published_dtype(settings: TrainerSettings) -> torch.dtype:
    """PUBLISH_TYPE as torch has it."""
    return torch.bfloat16 if settings.publish_type is PublishedType.BFLOAT16 else torch.float32


def make_publisher(
    settings: TrainerSettings, policy: Policy, ranks: Ranks, services: ServiceThread | None
) -> Publisher:
    """The publisher that PUBLISH_TRANSPORT names; ``services`` is None on every rank but 0."""
    return DiskPublisher(settings, policy, ranks, services)
