"""Publishes policy versions: from the trainer's shards into every rollout worker, verified by version.

Two transports behind one interface: versioned directories on the shared volume (disk.py), and broadcast through the
workers' weight-update groups (broadcast.py). Either way every version ends on the volume, since that is where a worker
that missed an update, or comes back from a restart, gets it.
"""

from __future__ import annotations

from typing import Protocol

from trainer.config import TrainerSettings, Transport
from trainer.distributed import Ranks
from trainer.policy import Policy
from trainer.publishing.broadcast import BroadcastPublisher
from trainer.publishing.disk import DiskPublisher
from trainer.service_thread import ServiceThread


class Publisher(Protocol):
    """Makes the policy in training what the rollout workers serve."""

    def publish(self, version: int) -> dict[str, float]:
        """Publishes as ``version``; a collective. Returns seconds and counts by metric name, on rank 0.

        Raises:
            DependencyLostError: fewer than MIN_WORKERS workers serve the version; raised on every rank.
        """

    def close(self) -> None:
        """Finishes what still goes on."""


def make_publisher(
    settings: TrainerSettings, policy: Policy, ranks: Ranks, services: ServiceThread | None
) -> Publisher:
    """The publisher that PUBLISH_TRANSPORT names; ``services`` is None on every rank but 0."""
    if settings.publish_transport is Transport.BROADCAST:
        return BroadcastPublisher(settings, policy, ranks, services)
    return DiskPublisher(settings, policy, ranks, services)
