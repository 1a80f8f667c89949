"""Weights that arrive by broadcast.

Tensors are received beside the weights in use and replace them only when an update is complete, so an update that fails
half-way leaves the old weights and their version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from services.embedded_engine.compute.weights import Architecture, WeightsError, check, check_finite
from services.weights.broadcast_group import (
    broadcast_weights,
    join_weights_group,
    leave_weights_group,
    unflattened,
)

JOIN_SECONDS = 120.0
BROADCAST_SECONDS = 120.0

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class ReceivedUpdate:
    """The tensors that were broadcast between the begin and the end of an update."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    version: str | None = None
    flush_cache: bool = False
    refused: str = ""
    """The reason for which a part of the update was refused."""


class WeightsReceiver:
    """The broadcast groups that this worker has joined, and the update that is being received.

    Its methods block and, except for ``rendezvous``, must be called one at a time. Every failure is a WeightsError,
    after which the weights in use are unchanged.
    """

    def __init__(self, architecture: Architecture, device: torch.device) -> None:
        self._architecture = architecture
        self._device = device
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._update: ReceivedUpdate | None = None

    def rendezvous(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> dist.ProcessGroup:
        """Wait until all members of a group have met, and return the group, for ``join``."""
        try:
            return join_weights_group(
                master_address, master_port, rank_offset, world_size, group_name, backend, JOIN_SECONDS
            )
        except (RuntimeError, ValueError) as error:
            raise WeightsError(
                f"rank {rank_offset} of group {group_name!r} did not meet {master_address}:{master_port}: {error}"
            ) from error

    def join(self, group_name: str, group: dist.ProcessGroup) -> None:
        """Join a group whose members have met."""
        self._groups[group_name] = group

    def leave(self, group_name: str) -> bool:
        """Leave a group; return False if it is not joined."""
        group = self._groups.pop(group_name, None)
        if group is not None:
            leave_weights_group(group)
        return group is not None

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.leave(name)

    def begin(self) -> None:
        """Open an update, and drop an unfinished earlier one."""
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
        is_flattened: bool = False,
    ) -> None:
        """Receive tensors in the order of ``names``; the version of the last call is the update's.

        They come one by one, or with ``is_flattened`` as one bucket of bytes.
        """
        update = self._update
        if update is None:
            raise WeightsError("no update is open: call /begin_weight_update first")
        group = self._groups.get(group_name)
        if group is None:
            raise WeightsError(f"group {group_name!r} is not joined: call /init_weights_update_group first")
        try:
            flat, tensors = self._allocate(names, dtypes, shapes)
        except WeightsError as error:
            update.refused = str(error)
            raise
        try:
            for tensor in [flat] if is_flattened else tensors.values():
                broadcast_weights(tensor, group, BROADCAST_SECONDS)
        except RuntimeError as error:
            self._update = None
            raise WeightsError(f"the broadcast of group {group_name!r} broke off: {error}") from error
        update.tensors.update(tensors)
        update.version = version
        update.flush_cache = update.flush_cache or flush_cache

    def end(self) -> ReceivedUpdate:
        """Close the update and return it: with all tensors of the model, all of them finite, or with none."""
        update, self._update = self._update, None
        if update is None:
            raise WeightsError("no update is open, or it broke off: nothing was changed")
        if update.refused:
            raise WeightsError(f"a part of the update was refused, so nothing was changed: {update.refused}")
        if update.tensors:
            shapes = {name: tuple(tensor.shape) for name, tensor in update.tensors.items()}
            check(self._architecture, shapes, "the update")
            check_finite(update.tensors, "the update")
        return update

    def _allocate(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the memory of a bucket, and its tensors as parts of it."""
        if not len(names) == len(dtypes) == len(shapes):
            raise WeightsError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes do not go together")
        given = {name: tuple(shape) for name, shape in zip(names, shapes, strict=True)}
        check(self._architecture, given, "the update", is_complete=False)
        kinds = [_DTYPES.get(dtype.removeprefix("torch.")) for dtype in dtypes]
        types = [kind for kind in kinds if kind is not None]
        if len(types) < len(kinds):
            name, dtype = next((n, d) for n, d, kind in zip(names, dtypes, kinds, strict=True) if kind is None)
            raise WeightsError(f"{name} has dtype {dtype!r}; allowed are {', '.join(_DTYPES)}")
        size = sum(torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, types, strict=True))
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        try:
            return flat, dict(zip(names, unflattened(flat, shapes, types), strict=True))
        except ValueError as error:
            raise WeightsError(f"the bucket cannot be taken apart: {error}") from error
