"""Publishing of policy versions: from the trainer's shards into every rollout worker, verified by version.

There are two transports behind one interface: versioned directories on the shared volume (disk.py), and broadcast
through the workers' weight-update groups (broadcast.py). With LORA_RANK both send adapters only (adapters.py). Every
version is written to the volume, because a worker that missed an update, or restarted, loads it from there.
"""

from __future__ import annotations

from trainer.config import TrainerSettings, Transport
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks
from trainer.publishing.adapters import AdapterPublisher
from trainer.publishing.broadcast import BroadcastPublisher
from trainer.publishing.disk import DiskPublisher
from trainer.publishing.publisher import Publisher
from trainer.service_thread import ServiceThread

__all__ = ["Publisher", "make_publisher"]


def make_publisher(
    settings: TrainerSettings, policy: Policy, ranks: Ranks, services: ServiceThread | None
) -> Publisher:
    """Return the publisher for LORA_RANK and PUBLISH_TRANSPORT; ``services`` is None on every rank but 0."""
    if settings.lora_rank:
        return AdapterPublisher(settings, policy, ranks, services)
    kind = BroadcastPublisher if settings.publish_transport is Transport.BROADCAST else DiskPublisher
    return kind(settings, policy, ranks, services)
