"""SGLang's routes that change weights and load LoRA adapters.

Weights and version change together, between two steps, as a whole or not at all. Tensors are received while the weights
in use stay, and replace them only when an update is complete, so an update that fails half-way leaves the old weights
and their version. One adapter can be loaded at a time; it replaces no weights.
"""

from __future__ import annotations

import asyncio
from asyncio import wrap_future
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from torch import Tensor

from services.core import machine
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.embedded_engine.adapters import read_adapter
from services.embedded_engine.requests import EngineState, state_of
from services.embedded_engine.weights import TensorNames, WeightsError, check, check_finite
from services.http.json_body import JsonRoute
from services.protocol.base import StrictModel
from services.weights.broadcast_group import join_weights_group, leave_weights_group, receive_weights, unflattened
from services.weights.shared_tensors import BucketError, unpack_bucket

log = get_logger(__name__)
router = APIRouter(route_class=JsonRoute)

DEFAULT_GROUP = "weight_update_group"
JOIN_SECONDS = 120.0
"""Longest wait until all members of a broadcast group have met."""
BROADCAST_SECONDS = 120.0
"""Longest wait for one tensor or bucket of a broadcast."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _reply(done: str, **context: Any) -> dict[str, Any]:
    """Log what was done, and return SGLang's reply; none of its pauses leaves a request as it is."""
    log.info(done, **context)
    return {"success": True, "message": done, "num_paused_requests": 0}


# --- weights ---


class Update(BaseModel):
    """The fields that all updates have."""

    weight_version: str | None = None
    flush_cache: Literal[True] = True
    abort_all_requests: Literal[False] = False


class UpdateFromDisk(Update):
    """Body of /update_weights_from_disk."""

    model_path: str


class InitGroup(BaseModel):
    """Body of /init_weights_update_group. ``rank_offset`` is this worker's rank, because the worker has only one."""

    master_address: str
    master_port: int = Field(ge=1, le=65_535)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)
    group_name: str = DEFAULT_GROUP
    backend: str = Field(default="gloo", pattern="^(gloo|nccl)$")


class DestroyGroup(BaseModel):
    """Body of /destroy_weights_update_group."""

    group_name: str = DEFAULT_GROUP


class BeginUpdate(BaseModel):
    """Body of /begin_weight_update: an update always has all weights of the model."""

    selector: Literal["all"] = "all"


class UpdatePart(Update, StrictModel):
    """A part of an update; the version of the last part is the update's."""


class UpdateFromDistributed(UpdatePart):
    """Body of /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = DEFAULT_GROUP
    load_format: Literal["flattened_bucket"] | None = None


class UpdateFromTensor(UpdatePart):
    """Body of /update_weights_from_tensor: a pickle in base64 for each tensor-parallel rank, of which there is one."""

    serialized_named_tensors: list[str] = Field(min_length=1, max_length=1)
    load_format: Literal["flattened_bucket"]


@dataclass
class ReceivedUpdate:
    """The tensors that came between the begin and the end of an update."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    version: str | None = None
    refused: str = ""
    """The reason for which a part of the update was refused."""

    def add(self, tensors: Mapping[str, Tensor], part: UpdatePart) -> None:
        """Add the tensors of a part."""
        self.tensors.update(tensors)
        self.version = part.weight_version


class WeightsReceiver:
    """The broadcast groups that this worker has joined, and the update that is being received.

    Its methods block and, except for ``rendezvous``, are called one at a time, with ``lock`` held. Every failure is a
    WeightsError, after which the weights in use are unchanged.
    """

    def __init__(self, architecture: TensorNames, device: torch.device) -> None:
        self.lock = asyncio.Lock()
        """Its holder may wait long for the trainer; updates from disk do not wait for it."""
        self._architecture = architecture
        self._device = device
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._update: ReceivedUpdate | None = None

    def rendezvous(self, body: InitGroup) -> dist.ProcessGroup:
        """Wait until all members of a group have met, and return the group, for ``join``."""
        host, port, rank, name = body.master_address, body.master_port, body.rank_offset, body.group_name
        try:
            return join_weights_group(host, port, rank, body.world_size, name, body.backend, JOIN_SECONDS)
        except (RuntimeError, ValueError) as error:
            raise WeightsError(f"rank {rank} of group {name!r} did not meet {host}:{port}: {error}") from error

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

    def receive(self, body: UpdateFromDistributed) -> None:
        """Receive tensors in the order of their names, one by one or as one bucket of bytes."""
        with self._part() as update:
            group = self._groups.get(body.group_name)
            if group is None:
                raise WeightsError(f"group {body.group_name!r} is not joined: call /init_weights_update_group first")
            flat, tensors = self._allocate(body)
        try:
            for tensor in [flat] if body.load_format else tensors.values():
                receive_weights(tensor, group, BROADCAST_SECONDS)
        except RuntimeError as error:
            self._update = None
            raise WeightsError(f"the broadcast of group {body.group_name!r} broke off: {error}") from error
        update.add(tensors, body)

    def map_shared(self, body: UpdateFromTensor) -> None:
        """Add the tensors of a bucket in the trainer's memory, which stay there until they are packed."""
        with self._part() as update:
            tensors = unpack_bucket(body.serialized_named_tensors[0])
            check(self._architecture, _shapes(tensors), "the update", is_complete=False)
        update.add(tensors, body)

    def end(self) -> ReceivedUpdate:
        """Close the update and return it: with all tensors of the model, all of them finite, or with none."""
        update, self._update = self._update, None
        if update is None:
            raise WeightsError("no update is open, or it broke off: nothing was changed")
        if update.refused:
            raise WeightsError(f"a part of the update was refused, so nothing was changed: {update.refused}")
        if update.tensors:
            check(self._architecture, _shapes(update.tensors), "the update")
            check_finite(update.tensors, "the update")
        return update

    @contextmanager
    def _part(self) -> Iterator[ReceivedUpdate]:
        """Yield the open update, which a refusal within the block spoils as a whole."""
        if self._update is None:
            raise WeightsError("no update is open: call /begin_weight_update first")
        try:
            yield self._update
        except (BucketError, WeightsError) as error:
            self._update.refused = str(error)
            raise WeightsError(str(error)) from error

    def _allocate(self, body: UpdateFromDistributed) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the memory of a bucket, and its tensors as parts of it."""
        names, dtypes, shapes = body.names, body.dtypes, body.shapes
        if not len(names) == len(dtypes) == len(shapes):
            raise WeightsError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes do not go together")
        check(self._architecture, dict(zip(names, map(tuple, shapes), strict=True)), "the update", is_complete=False)
        kinds = [_DTYPES.get(dtype.removeprefix("torch.")) for dtype in dtypes]
        types = [kind for kind in kinds if kind is not None]
        if len(types) < len(kinds):
            place = kinds.index(None)
            raise WeightsError(f"{names[place]} has dtype {dtypes[place]!r}; allowed are {', '.join(_DTYPES)}")
        size = sum(torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, types, strict=True))
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        try:
            return flat, dict(zip(names, unflattened(flat, shapes, types), strict=True))
        except ValueError as error:
            raise WeightsError(f"the bucket cannot be taken apart: {error}") from error


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _receiver(http: Request) -> WeightsReceiver:
    receiver: WeightsReceiver = http.app.state.receiver
    return receiver


@router.post("/update_weights_from_disk", tags=["weights"])
async def update_weights_from_disk(body: UpdateFromDisk, http: Request) -> Any:
    """Serve a model directory's weights from the next step on, or change nothing if they do not fit.

    The weights in use stay in memory while the new ones are read. Requests in flight end first, unless generation is
    paused.
    """
    state = state_of(http)
    async with state.update_lock:
        weights = await in_background(lambda: state.loaded.read_weights(Path(body.model_path)))
        await _change(state, weights, body.weight_version)
        state.model_path = body.model_path
        return _reply("weights updated from disk", model_path=body.model_path)


async def _change(state: EngineState, weights: Any, version: str | None) -> None:
    """Exchange weights, as the model packed them, and version."""
    await wrap_future(state.engine.change_weights(weights, state.engine.version if version is None else version))
    if not machine.keeps_memory(state.settings.keep_memory):
        await in_background(machine.release_memory)


@router.post("/init_weights_update_group", tags=["weights"])
async def init_weights_update_group(body: InitGroup, http: Request) -> Any:
    """Join a broadcast group whose rank 0 is the trainer; answered when all members have joined.

    A group of the same name is left first.
    """
    receiver = _receiver(http)
    async with receiver.lock:
        receiver.leave(body.group_name)
    # Without the lock, because members that never come would keep the next update waiting.
    receiver.join(body.group_name, await in_background(partial(receiver.rendezvous, body)))
    return _reply("group joined", group=body.group_name)


@router.post("/destroy_weights_update_group", tags=["weights"])
async def destroy_weights_update_group(body: DestroyGroup, http: Request) -> Any:
    """Leave a broadcast group."""
    receiver = _receiver(http)
    async with receiver.lock:
        if not receiver.leave(body.group_name):
            raise WeightsError(f"group {body.group_name!r} is not joined")
    return _reply("group left", group=body.group_name)


@router.post("/begin_weight_update", tags=["weights"])
async def begin_weight_update(body: BeginUpdate, http: Request) -> Any:
    """Open an update by broadcast or a shared GPU. Requests in flight end first, unless generation is paused."""
    receiver = _receiver(http)
    async with receiver.lock:
        await wrap_future(state_of(http).engine.drain())
        receiver.begin()
    return _reply("update open")


@router.post("/update_weights_from_distributed", tags=["weights"])
async def update_weights_from_distributed(body: UpdateFromDistributed, http: Request) -> Any:
    """Receive tensors in the order of ``names``; they serve once /end_weight_update closes the update."""
    receiver = _receiver(http)
    async with receiver.lock:
        await in_background(partial(receiver.receive, body))
    return _reply("weights received", tensors=len(body.names))


@router.post("/update_weights_from_tensor", tags=["weights"])
async def update_weights_from_tensor(body: UpdateFromTensor, http: Request) -> Any:
    """Map tensors in memory of this GPU; they serve once /end_weight_update has copied them."""
    receiver = _receiver(http)
    async with receiver.lock:
        await in_background(partial(receiver.map_shared, body))
    return _reply("weights mapped")


@router.post("/end_weight_update", tags=["weights"])
async def end_weight_update(http: Request) -> Any:
    """Serve the tensors received since /begin_weight_update, or change nothing if they are not the whole model.

    Requests in flight end first, unless generation is paused.
    """
    state, receiver = state_of(http), _receiver(http)
    async with receiver.lock:
        update = receiver.end()
        if update.tensors:
            weights = await in_background(lambda: state.loaded.pack(update.tensors))
            async with state.update_lock:
                await _change(state, weights, update.version)
    return _reply("update closed")


class CheckWeights(BaseModel):
    """Body of /weights_checker."""

    action: Literal["checksum"] = "checksum"
    selector: Literal["all", "target"] = "all"


@router.post("/weights_checker", tags=["weights"])
async def check_weights(http: Request, body: CheckWeights | None = None) -> Any:
    """Return the digest of each tensor that the engine computes with, by its name in a checkpoint; the only rank's."""
    state, action = state_of(http), (body or CheckWeights()).action
    found = await in_background(state.loaded.digests)
    return _reply(f"{action} of {len(found)} tensors") | {"ranks": [{"checksums": found}]}


# --- LoRA adapters ---


class LoadAdapter(BaseModel):
    """Body of /load_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_path: str


class UnloadAdapter(BaseModel):
    """Body of /unload_lora_adapter."""

    lora_name: str


class UpdateVersion(BaseModel):
    """Body of /update_weight_version."""

    new_version: str
    abort_all_requests: Literal[False] = False


@router.post("/load_lora_adapter", tags=["weights"])
async def load_lora_adapter(body: LoadAdapter, http: Request) -> Any:
    """Load an adapter from a directory. Requests in flight end first, unless generation is paused."""
    state = state_of(http)
    model = state.loaded.model
    read = partial(read_adapter, Path(body.lora_path), model.architecture, model.device)
    async with state.update_lock:
        if state.engine.adapter_name is not None:
            raise WeightsError(f"{state.engine.adapter_name} is loaded already; unload it first")
        await wrap_future(state.engine.change_adapter(await in_background(read), body.lora_name))
        state.adapter_path = body.lora_path
    return _reply("adapter loaded", name=body.lora_name, path=body.lora_path)


@router.post("/unload_lora_adapter", tags=["weights"])
async def unload_lora_adapter(body: UnloadAdapter, http: Request) -> Any:
    """Remove the adapter; requests for it end as aborted unless another is loaded before a pause ends."""
    state = state_of(http)
    async with state.update_lock:
        if body.lora_name != state.engine.adapter_name:
            raise WeightsError(f"LoRA with name {body.lora_name} does not exist")
        await wrap_future(state.engine.change_adapter(None, body.lora_name))
    return _reply("adapter unloaded", name=body.lora_name)


@router.post("/update_weight_version", tags=["weights"])
async def update_weight_version(body: UpdateVersion, http: Request) -> Any:
    """Say that the tokens from now on are of another version."""
    engine = state_of(http).engine
    await wrap_future(engine.change_version(body.new_version))
    return {"success": True, "message": f"Weight version updated to {body.new_version}"}
