"""Publishing through versioned directories on the shared volume."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from services.clients.rollout_admin import WorkerAdmin
from services.weights.policy_store import PolicyStore
from trainer.model.gathering import gather_state
from trainer.model.saving import DiskFullError, write_model, writing
from trainer.publishing.publisher import Publisher
from trainer.publishing.workers import PUBLISH_SECONDS, registered_workers, update_workers

VERSIONS_KEPT = 2
"""Versions kept on the shared volume besides those that a worker is loading. The older one serves a worker that looked
up the newest version just before a newer one appeared."""


class DiskPublisher(Publisher):
    """A publisher that writes a version, then has every worker load it."""

    def put_on_volume(self, version: int) -> None:
        """See Publisher."""
        # No copy on a CPU: everything is written before the parameters change.
        state = gather_state(self.policy.full_parameters(self.rounding), self.ranks, copy=False)
        save = partial(write_model, self.policy, state, dtype=self.rounding.dtype)
        self.ranks.on_main(lambda: write_version(self.store, version, save), DiskFullError)

    def close(self) -> None:
        """Do nothing: no work goes on after ``publish`` returned."""

    async def deliver(self, version: int) -> dict[str, float]:
        """See Publisher."""
        pauses = [0.0]

        async def update(worker: WorkerAdmin) -> None:
            began = time.perf_counter()
            # After a failure the worker stays paused, because its weights may be of two versions. Its launcher ends the
            # pause once the worker has caught up.
            await self.load(worker, version)
            await worker.resume()
            pauses.append(time.perf_counter() - began)

        is_there = partial(self.is_on_volume, version)
        urls = await registered_workers(self.settings, is_there)
        served = await update_workers(self.settings, urls, version, update, is_there)
        return {"workers": float(served), "pause_seconds": max(pauses)}

    async def load(self, worker: WorkerAdmin, version: int) -> None:
        """Stop a worker's generation and have it load the version."""
        await worker.hold(finishes_requests=not self.settings.publishes_in_place)
        await worker.update_from_disk(self.store.path(version), version)


def write_version(store: PolicyStore, version: int, save: Callable[[Path], None]) -> None:
    """Write a version with ``save``, make it visible, and delete old ones. A failed write leaves nothing.

    The oldest version is deleted before the new one is written: the file cache reuses its pages, which makes the write
    four times as fast. The newest version always stays.

    Raises:
        DiskFullError: the disk is full.
    """
    with writing(store.policy_dir):
        store.prune(max(VERSIONS_KEPT - 1, 1), PUBLISH_SECONDS)
        directory = store.begin(version)
        try:
            save(directory)
            store.commit(version)
        except Exception:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        store.prune(VERSIONS_KEPT, PUBLISH_SECONDS)
