"""Publishing of LoRA adapters: they go to the workers unmerged, and the weights that they adapt are never sent.

Merged weights would be rounded to the published type, in which a trained change that is small beside the weights mostly
vanishes. Adapters keep it whole, in about a hundredth of the bytes.
"""

from __future__ import annotations

import pickle
from functools import partial

import torch
from torch import Tensor

from services.clients.rollout_admin import WorkerAdmin
from trainer.config import Transport
from trainer.model.gathering import gather_state
from trainer.model.policy import Policy
from trainer.model.rounding import Rounding
from trainer.model.saving import DiskFullError, write_adapter
from trainer.publishing.disk import DiskPublisher, write_version


class AdapterPublisher(DiskPublisher):
    """A publisher that writes each version's adapters to the volume and has every worker load them.

    Workers read the volume, or with PUBLISH_TRANSPORT=broadcast get the tensors in the request itself, because SGLang
    has no route that receives adapters through a process group.
    """

    _state: dict[str, Tensor]
    """The adapters of the version written last; on rank 0."""

    def rounding_of(self, policy: Policy) -> Rounding:
        """See Publisher; adapters keep nearly all of their change."""
        return Rounding(getattr(torch, self.settings.publish_type))

    def put_on_volume(self, version: int) -> None:
        """See Publisher."""
        parameters = self.policy.adapter_parameters(self.rounding.dtype)
        self._state = gather_state(parameters, self.ranks, copy=True)
        save = partial(write_adapter, self.policy, self._state)
        self.ranks.on_main(lambda: write_version(self.store, version, save), DiskFullError)

    async def load(self, worker: WorkerAdmin, version: int) -> None:
        """See DiskPublisher."""
        await worker.hold(finishes_requests=not self.settings.publishes_in_place, for_adapter=True)
        if self.settings.publish_transport is Transport.BROADCAST:
            await worker.load_adapter_from_tensors(self.policy.adapter_config(), pickle.dumps(self._state), version)
        else:
            await worker.load_adapter(self.store.path(version), version)
