"""The base of both publishers: write a policy version to the shared volume, then have the rollout workers serve it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from services.core import machine
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.weights.policy_store import PolicyStore
from trainer.config import PublishedType, TrainerSettings
from trainer.model.gathering import plain_name
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks
from trainer.model.rounding import MeasuredRounding, Rounding
from trainer.publishing.workers import VersionGoneError
from trainer.service_thread import InterruptedCallError, ServiceThread

log = get_logger(__name__)

WRITES = 4
"""Most times that a version is written before its disappearance ends the run."""


class Publisher(ABC):
    """The way of the policy in training to the rollout workers. Methods are collectives unless they say otherwise."""

    def __init__(self, settings: TrainerSettings, policy: Policy, ranks: Ranks, services: ServiceThread | None) -> None:
        """Begin before a checkpoint is loaded into the policy; ``services`` is None on every rank but 0."""
        self.settings = settings
        self.policy = policy
        self.ranks = ranks
        self.services = services
        self.store = PolicyStore(settings.policy_dir)
        self.rounding = self.rounding_of(policy)
        self._written: int | None = None
        """The version that was written last."""
        self._figures: dict[str, float] = {}
        """Its metrics."""

    def publish(self, version: int) -> dict[str, float]:
        """Have the workers serve ``version``; write it first, unless it was the last version written.

        Returns:
            Seconds and counts by metric name, on every rank.

        Raises:
            DependencyLostError: fewer than MIN_WORKERS workers serve the version; raised on every rank.
            DiskFullError: the version cannot be written; raised on every rank.
            InterruptedCallError: the run was asked to stop; raised on every rank.
        """
        writes = 0
        while True:
            if self._written != version:
                self.write(version)
            if not self.settings.keep_memory:
                # Rollout workers on the same machine need room for the new weights beside the old. The version was
                # gathered in memory that the update had left.
                machine.release_memory()
            try:
                return self._figures | self.update_workers(version)
            except VersionGoneError as error:
                writes += 1
                if writes == WRITES:
                    raise
                log.warning("policy version is written again", policy_version=version, reason=str(error))
                self._written = None

    def write(self, version: int) -> None:
        """Write the version to the shared volume, where workers that start find it. This needs no worker.

        Raises:
            DependencyLostError: the volume does not take it; raised on every rank.
            DiskFullError: the disk is full; raised on every rank.
        """
        self.put_on_volume(version)
        self._written = version
        if isinstance(self.rounding, MeasuredRounding):
            share = self.rounding.share(self.ranks)
            self._figures = {} if share is None else {"publish_share": share}

    def update_workers(self, version: int) -> dict[str, float]:
        """Have the workers serve the version that was written last; see ``publish``.

        Raises:
            VersionGoneError: too few workers serve it, and no worker can catch up because the volume has lost it.
        """

        def work() -> dict[str, float]:
            assert self.services is not None, "rank 0 has the services"
            return self.services.call(self.deliver(version), interruptible=True)

        if self.settings.engine_sleeps:
            torch.cuda.empty_cache()  # the version was gathered in memory that engines need to wake for it
        errors = (VersionGoneError, DependencyLostError, InterruptedCallError)
        metrics: dict[str, float] = self.ranks.on_main(work, *errors)
        return metrics

    def rounding_of(self, policy: Policy) -> Rounding:
        """Return the rounding of the weights of PUBLISH_TYPE, which are compared with those that the policy has now."""
        if self.settings.publish_type is PublishedType.FLOAT32:
            return Rounding(torch.float32)
        return MeasuredRounding((plain_name(name), value) for name, value in policy.model.named_parameters())

    def is_on_volume(self, version: int) -> bool:
        """Return True when a worker that starts or missed the version finds it. No collective; for rank 0."""
        try:
            return self.store.path(version).is_dir()
        except OSError:
            return True  # The volume does not answer, so the version may still be there.

    @abstractmethod
    def put_on_volume(self, version: int) -> None:
        """Write the version, or start to write it beside the training."""

    @abstractmethod
    async def deliver(self, version: int) -> dict[str, float]:
        """Bring the version into the workers; return metrics. No collective; for rank 0."""

    @abstractmethod
    def close(self) -> None:
        """Wait for work that still goes on. No collective."""
