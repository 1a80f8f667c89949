"""Weights that arrive by broadcast.

Tensors are received beside the ones in use, and replace them only when an update is complete: one that fails half-way
leaves the old weights and their version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from services.embedded_engine.compute import weights
from services.embedded_engine.compute.weights import Architecture, WeightsError
from services.weights.broadcast_group import broadcast_weights, join_weights_group, leave_weights_group

JOIN_SECONDS = 120.0
BROADCAST_SECONDS = 120.0

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class ReceivedUpdate:
    """What was broadcast between the begin and the end of an update."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    version: str | None = None
    flush_cache: bool = False
    refused: str = ""
    """Why a part of it was not taken."""


class WeightsReceiver:
    """The groups that this worker has joined, and the update that is being received. One call at a time, but for meet.

    Its methods block; every failure is a WeightsError, after which the serving weights are what they were.
    """

    def __init__(self, architecture: Architecture, device: torch.device) -> None:
        self._architecture = architecture
        self._device = device
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._update: ReceivedUpdate | None = None

    def meet(
        self, master_address: str, master_port: int, rank: int, world_size: int, group_name: str, backend: str
    ) -> dist.ProcessGroup:
        """Meets the other members of a group, for which it may wait long; ``join`` takes what it returns."""
        try:
            return join_weights_group(master_address, master_port, rank, world_size, group_name, backend, JOIN_SECONDS)
        except (RuntimeError, ValueError) as error:
            raise WeightsError(
                f"rank {rank} of group {group_name!r} did not meet {master_address}:{master_port}: {error}"
            ) from error

    def join(self, group_name: str, group: dist.ProcessGroup) -> None:
        """Joins a group whose members have met."""
        self._groups[group_name] = group

    def leave(self, group_name: str) -> bool:
        """Leaves a group; False when it is not joined."""
        group = self._groups.pop(group_name, None)
        if group is not None:
            leave_weights_group(group)
        return group is not None

    def begin(self) -> None:
        """Opens an update; what an earlier one left unfinished is dropped."""
        self._update = ReceivedUpdate()

    def receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        *,
        version: str | None,
        flush_cache: bool,
    ) -> None:
        """Receives tensors in the order of ``names``; the last call's version is the update's."""
        update = self._update
        if update is None:
            raise WeightsError("no update is open: call /begin_weight_update first")
        group = self._groups.get(group_name)
        if group is None:
            raise WeightsError(f"group {group_name!r} is not joined: call /init_weights_update_group first")
        try:
            tensors = self._allocate(names, dtypes, shapes)
        except WeightsError as error:
            update.refused = str(error)
            raise
        try:
            for tensor in tensors.values():
                broadcast_weights(tensor, group, BROADCAST_SECONDS)
        except RuntimeError as error:
            self._update = None
            raise WeightsError(f"the broadcast of group {group_name!r} broke off: {error}") from error
        update.tensors.update(tensors)
        update.version = version
        update.flush_cache = update.flush_cache or flush_cache

    def end(self) -> ReceivedUpdate:
        """Closes the update and gives it; its tensors are all of the model's, and finite, or there are none."""
        update, self._update = self._update, None
        if update is None:
            raise WeightsError("no update is open, or it broke off: nothing was changed")
        if update.refused:
            raise WeightsError(f"a part of the update was refused, so nothing was changed: {update.refused}")
        received = update.tensors
        if not received:
            return update
        weights.check(self._architecture, {name: tuple(t.shape) for name, t in received.items()}, "the update")
        weights.check_finite(received, "the update")
        return update

    def close(self) -> None:
        """Leaves all groups."""
        for name in list(self._groups):
            self.leave(name)

    def _allocate(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        if not len(names) == len(dtypes) == len(shapes):
            raise WeightsError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes do not go together")
        expected = self._architecture.shapes()
        tensors: dict[str, Tensor] = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            kind = _DTYPES.get(dtype.removeprefix("torch."))
            if kind is None:
                raise WeightsError(f"{name} has dtype {dtype!r}; allowed are {', '.join(_DTYPES)}")
            wanted = expected.get(name)
            if wanted is None and not weights.is_ignored(self._architecture, name):
                raise WeightsError(f"{name} is not part of the model")
            if wanted is not None and wanted != tuple(shape):
                raise WeightsError(f"{name} is {list(shape)} instead of {list(wanted)}")
            tensors[name] = torch.empty(tuple(shape), dtype=kind, device=self._device)
        return tensors
