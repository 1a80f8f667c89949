"""Publishing through versioned directories on the shared volume."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path

import torch

from services.clients.rollout_admin import WorkerAdmin
from services.core.errors import DependencyLostError
from services.weights.policy_store import PolicyStore
from trainer.checkpoints.volume import DiskFullError, writing
from trainer.config import PublishedType, TrainerSettings
from trainer.model.policy import save_pretrained
from trainer.publishing.publisher import Publisher
from trainer.publishing.workers import VersionGoneError, held, registered_workers, update_workers


class DiskPublisher(Publisher):
    """Writes a version, then has every worker load it."""

    def put_on_volume(self, version: int) -> None:
        """See Publisher."""

        def begin() -> str:
            return str(begin_version(self.store, version, self.settings))

        directory = Path(self.ranks.on_main(begin, DiskFullError))
        try:
            save_pretrained(self.policy, self.ranks, directory, published_dtype(self.settings))
        except DiskFullError:
            if self.ranks.is_main:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        self.ranks.on_main(lambda: commit_version(self.store, version, self.settings), DiskFullError)

    def update_workers(self, version: int) -> dict[str, float]:
        """See Publisher."""

        def work() -> dict[str, float]:
            assert self.services is not None
            return self.services.call(self._update_workers(version))

        metrics: dict[str, float] = self.ranks.on_main(work, VersionGoneError, DependencyLostError)
        return metrics

    def close(self) -> None:
        """Nothing goes on after ``publish`` returned."""

    async def _update_workers(self, version: int) -> dict[str, float]:
        path, pauses = self.store.path(version), [0.0]

        async def update(worker: WorkerAdmin, _index: int) -> None:
            began = time.perf_counter()
            async with held(worker, self.settings):
                await worker.update_from_disk(path, version)
            pauses.append(time.perf_counter() - began)

        is_there = partial(self.is_on_volume, version)
        urls = await registered_workers(self.settings, is_there)
        served = await update_workers(self.settings, urls, version, update, is_there)
        return {"workers": float(served), "pause_seconds": max(pauses)}


def begin_version(store: PolicyStore, version: int, settings: TrainerSettings) -> Path:
    """An empty directory to write a version into.

    One that must go for it goes first, since a file that is written to pages just freed takes a quarter of the time;
    but the newest stays.
    """
    with writing(store.policy_dir):
        store.prune(max(settings.published_versions_kept - 1, 1), settings.publish_deadline_seconds)
        return store.begin(version)


def commit_version(store: PolicyStore, version: int, settings: TrainerSettings) -> None:
    """Makes a version visible that was written since ``begin_version``."""
    with writing(store.policy_dir):
        store.commit(version)
        store.prune(settings.published_versions_kept, settings.publish_deadline_seconds)


def published_dtype(settings: TrainerSettings) -> torch.dtype:
    """PUBLISH_TYPE as torch has it."""
    return torch.bfloat16 if settings.publish_type is PublishedType.BFLOAT16 else torch.float32
