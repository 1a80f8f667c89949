"""Publishing of policy versions: from the trainer's shards into every rollout worker, verified by version.

There are two transports behind one interface: versioned directories on the shared volume (disk.py), and broadcast
through the workers' weight-update groups (broadcast.py). Both write every version to the volume, because a worker that
missed an update, or restarted, loads it from there.
"""

from __future__ import annotations

from trainer.config import TrainerSettings, Transport
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks
from trainer.publishing.broadcast import BroadcastPublisher
from trainer.publishing.disk import DiskPublisher
from trainer.publishing.publisher import Publisher
from trainer.service_thread import ServiceThread

__all__ = ["Publisher", "make_publisher"]


def make_publisher(
    settings: TrainerSettings, policy: Policy, ranks: Ranks, services: ServiceThread | None
) -> Publisher:
    """Return the publisher that PUBLISH_TRANSPORT names; ``services`` is None on every rank but 0."""
    kind = BroadcastPublisher if settings.publish_transport is Transport.BROADCAST else DiskPublisher
    return kind(settings, policy, ranks, services)
