"""The base of publishers: writes a policy version to the shared volume, and has the rollout workers serve it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from services.core.logs import get_logger
from services.weights.policy_store import PolicyStore
from trainer.config import TrainerSettings
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks
from trainer.publishing.workers import VersionGoneError
from trainer.service_thread import ServiceThread

log = get_logger(__name__)

WRITES = 4
"""The number of times that a version is written before its disappearance ends the run."""


class Publisher(ABC):
    """Makes the policy in training what the rollout workers serve. Its methods are collectives."""

    def __init__(self, settings: TrainerSettings, policy: Policy, ranks: Ranks, services: ServiceThread | None) -> None:
        """``services`` is None on every rank but 0."""
        self.settings = settings
        self.policy = policy
        self.ranks = ranks
        self.services = services
        self.store = PolicyStore(settings.policy_dir)
        self._written: int | None = None
        """The version that was written last."""

    def publish(self, version: int) -> dict[str, float]:
        """Publishes as ``version``: writes it, unless it was the last one written, and updates the workers.

        Returns:
            Seconds and counts by metric name, on rank 0.

        Raises:
            DependencyLostError: fewer than MIN_WORKERS workers serve the version; raised on every rank.
            DiskFullError: it cannot be written; raised on every rank.
        """
        writes = 0
        while True:
            if self._written != version:
                self.write(version)
            try:
                return self.update_workers(version)
            except VersionGoneError as error:
                writes += 1
                if writes == WRITES:
                    raise
                log.warning("policy version is written again", policy_version=version, reason=str(error))
                self._written = None

    def write(self, version: int) -> None:
        """Writes the version to the shared volume, which needs no worker; workers that start load it from there.

        Raises:
            DiskFullError: raised on every rank.
        """
        self.put_on_volume(version)
        self._written = version

    def is_on_volume(self, version: int) -> bool:
        """Return whether a worker that starts or missed the version finds it. For rank 0; no collective."""
        try:
            return self.store.path(version).is_dir()
        except OSError:
            return True  # the volume does not answer: whether the version is there is not known

    @abstractmethod
    def put_on_volume(self, version: int) -> None:
        """Writes the version, or begins to write it beside the training."""

    @abstractmethod
    def update_workers(self, version: int) -> dict[str, float]:
        """Has the workers serve the version that was written last; see ``publish``.

        Raises:
            VersionGoneError: too few workers serve it, and the volume has lost it, so that no worker can catch up.
        """

    @abstractmethod
    def close(self) -> None:
        """Finishes what still goes on."""
