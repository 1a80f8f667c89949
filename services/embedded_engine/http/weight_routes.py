"""SGLang's routes that pause generation, change weights, load LoRA adapters, and record a profile.

Weights and version change together, between two steps, as a whole or not at all. One adapter can be loaded at a time;
it replaces no weights.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from services.core import machine
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.embedded_engine.compute.adapters import Adapter, pack_adapter, read_adapter, unpickle_tensors
from services.embedded_engine.compute.engine import NotIdleError, PauseMode
from services.embedded_engine.compute.model import Weights
from services.embedded_engine.compute.weights import WeightsError
from services.embedded_engine.http.state import EngineState, state_of, wait_for
from services.http.json_body import JsonResponse
from services.http.problems import ProblemError
from services.protocol.base import StrictModel

log = get_logger(__name__)
T = TypeVar("T")


DEFAULT_GROUP = "weight_update_group"


class PauseRequest(BaseModel):
    """Body of /pause_generation."""

    mode: PauseMode = "abort"


class StartProfile(BaseModel):
    """Body of /start_profile."""

    output_dir: str = Field(min_length=1)


class UpdateFromDisk(BaseModel):
    """Body of /update_weights_from_disk."""

    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


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


class UpdateFromDistributed(StrictModel):
    """Body of /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = DEFAULT_GROUP
    flush_cache: bool = True
    abort_all_requests: Literal[False] = False
    weight_version: str | None = None
    load_format: Literal["flattened_bucket"] | None = None


class UpdateFromTensor(StrictModel):
    """Body of /update_weights_from_tensor: a pickle in base64 for each tensor-parallel rank, of which there is one."""

    serialized_named_tensors: list[str] = Field(min_length=1, max_length=1)
    load_format: Literal["flattened_bucket"]
    flush_cache: bool = True
    abort_all_requests: Literal[False] = False
    weight_version: str | None = None


def add_pause_routes(app: FastAPI) -> None:
    """Add the routes that pause and continue generation and flush the cache."""

    @app.post("/pause_generation", tags=["control"])
    async def pause_generation(body: PauseRequest, http: Request) -> Response:
        """Stop decoding: ``abort`` ends requests, ``retract`` computes them anew later, ``in_place`` keeps them."""
        paused = await wait_for(state_of(http).engine.pause(body.mode))
        return JsonResponse({"success": True, "message": f"paused {paused} sequences"})

    @app.post("/continue_generation", tags=["control"])
    async def continue_generation(http: Request) -> Response:
        """Continue decoding."""
        await _or_400(state_of(http).engine.resume())
        return JsonResponse({"success": True, "message": "generation continues"})

    @app.post("/release_memory_occupation", tags=["control"])
    async def release_memory_occupation(http: Request) -> Response:
        """Give the memory of keys and values away; refused unless generation is paused with retract or abort."""
        await _or_400(state_of(http).engine.occupy(has_memory=False))
        log.info("memory released")
        return Response()

    @app.post("/resume_memory_occupation", tags=["control"])
    async def resume_memory_occupation(http: Request) -> Response:
        """Take the memory of keys and values back; refused unless it was released."""
        await _or_400(state_of(http).engine.occupy(has_memory=True))
        log.info("memory taken back")
        return Response()

    @app.post("/flush_cache", tags=["control"])
    @app.get("/flush_cache", tags=["control"], include_in_schema=False)
    async def flush_cache(http: Request) -> Response:
        """Drop cached prompts; refused while requests run."""
        await _or_400(state_of(http).engine.flush())
        return JsonResponse({"success": True, "message": "cache flushed"})


def add_profile_routes(app: FastAPI) -> None:
    """Add the routes that record a profile of the engine's thread."""

    @app.post("/start_profile", tags=["control"])
    async def start_profile(body: StartProfile, http: Request) -> Response:
        """Begin to record what the processor does; refused while something is recorded."""
        state = state_of(http)
        await _or_400(state.engine.begin_profile())
        state.profile_directory = Path(body.output_dir)
        return JsonResponse({"success": True, "message": "profile begun"})

    @app.post("/stop_profile", tags=["control"])
    async def stop_profile(http: Request) -> Response:
        """Write ``trace.json.gz`` to the directory of /start_profile; refused if nothing is recorded."""
        state = state_of(http)
        recorded = await _or_400(state.engine.end_profile())
        path = state.profile_directory / "trace.json.gz"

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))

        try:
            await in_background(write)
        except OSError as error:
            raise ProblemError(507, f"the profile is not written: {error}") from error
        return JsonResponse({"success": True, "message": f"profile written to {path}"})


def add_disk_route(app: FastAPI) -> None:
    """Add the route that loads weights from a model directory."""

    @app.post("/update_weights_from_disk", tags=["weights"])
    async def update_weights_from_disk(body: UpdateFromDisk, http: Request) -> Response:
        """Serve a model directory's weights from the next step on, or change nothing if they do not fit.

        The weights in use stay in memory while the new ones are read. Requests in flight end first, unless generation
        is paused.
        """
        state = state_of(http)

        async def update() -> int:
            path = Path(body.model_path)
            weights = await in_background(lambda: state.loaded.read_weights(path))
            if body.abort_all_requests:
                await wait_for(state.engine.abort(lambda _: True, "the weights change"))
            paused = await _change(state, weights, body.weight_version, flush_cache=body.flush_cache)
            state.model_path = body.model_path
            return paused

        async with state.update_lock:
            return await _reply_to("weights updated from disk", update, model_path=body.model_path)


def add_group_routes(app: FastAPI) -> None:
    """Add the routes that join and leave a broadcast group."""

    @app.post("/init_weights_update_group", tags=["weights"])
    async def init_weights_update_group(body: InitGroup, http: Request) -> Response:
        """Join a broadcast group whose rank 0 is the trainer; answered when all members have joined.

        A group of the same name is left first.
        """
        state = state_of(http)

        async def join() -> None:
            async with state.receiver_lock:
                state.receiver.leave(body.group_name)
            # Without the lock, because members that never come would keep the next update waiting.
            group = await in_background(partial(state.receiver.rendezvous, **body.model_dump()))
            state.receiver.join(body.group_name, group)

        return await _reply_to("group joined", join, group=body.group_name)

    @app.post("/destroy_weights_update_group", tags=["weights"])
    async def destroy_weights_update_group(body: DestroyGroup, http: Request) -> Response:
        """Leave a broadcast group."""
        state = state_of(http)

        async def leave() -> None:
            if not state.receiver.leave(body.group_name):
                raise WeightsError(f"group {body.group_name!r} is not joined")

        async with state.receiver_lock:
            return await _reply_to("group left", leave, group=body.group_name)


def add_broadcast_routes(app: FastAPI) -> None:
    """Add the routes of an update by broadcast; those that open and close one serve shared GPUs, too."""

    @app.post("/begin_weight_update", tags=["weights"])
    async def begin_weight_update(body: BeginUpdate, http: Request) -> Response:
        """Open an update by broadcast or a shared GPU. Requests in flight end first, unless generation is paused."""
        state = state_of(http)

        async def begin() -> None:
            await wait_for(state.engine.drain())
            state.receiver.begin()

        async with state.receiver_lock:
            return await _reply_to("update open", begin)

    @app.post("/update_weights_from_distributed", tags=["weights"])
    async def update_weights_from_distributed(body: UpdateFromDistributed, http: Request) -> Response:
        """Receive tensors in the order of ``names``; they serve once /end_weight_update closes the update."""
        state = state_of(http)
        receive = partial(
            state.receiver.receive,
            body.names,
            body.dtypes,
            body.shapes,
            body.group_name,
            version=body.weight_version,
            flush_cache=body.flush_cache,
            is_flattened=body.load_format is not None,
        )
        async with state.receiver_lock:
            return await _reply_to("weights received", lambda: in_background(receive), tensors=len(body.names))

    @app.post("/end_weight_update", tags=["weights"])
    async def end_weight_update(http: Request) -> Response:
        """Serve the tensors received since /begin_weight_update, or change nothing if they are not the whole model.

        Requests in flight end first, unless generation is paused.
        """
        state = state_of(http)
        async with state.receiver_lock:
            return await _reply_to("update closed", lambda: _end_update(state))


async def _end_update(state: EngineState) -> int:
    """Exchange weights and version for those received; return the number of paused sequences."""
    update = state.receiver.end()
    if not update.tensors:
        return 0
    weights = await in_background(lambda: state.loaded.pack(update.tensors))
    async with state.update_lock:
        return await _change(state, weights, update.version, flush_cache=update.flush_cache)


def add_shared_memory_route(app: FastAPI) -> None:
    """Add the route of an update from a shared GPU, between the first and the last of one by broadcast."""

    @app.post("/update_weights_from_tensor", tags=["weights"])
    async def update_weights_from_tensor(body: UpdateFromTensor, http: Request) -> Response:
        """Map tensors in memory of this GPU; they serve once /end_weight_update has copied them."""
        state = state_of(http)

        def receive() -> None:
            data = _decoded(body.serialized_named_tensors[0])
            state.receiver.map_shared(data, version=body.weight_version, flush_cache=body.flush_cache)

        async with state.receiver_lock:
            return await _reply_to("weights mapped", lambda: in_background(receive))


def _decoded(text: str) -> bytes:
    """Return the bytes of a text in base64.

    Raises:
        WeightsError: it is something else.
    """
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise WeightsError(f"serialized_named_tensors is not base64: {error}") from error


async def _or_400(done: Future[T]) -> T:
    """Return the result of a call to the engine; a refusal of the engine is an answer with status 400."""
    try:
        return await wait_for(done)
    except NotIdleError as error:
        raise ProblemError(400, str(error)) from error


async def _change(state: EngineState, weights: Weights, version: str | None, *, flush_cache: bool) -> int:
    """Exchange weights and version; return the number of paused sequences."""
    change = state.engine.change_weights(
        weights, state.engine.version if version is None else version, keeps_caches=not flush_cache
    )
    paused = await wait_for(change)
    if not machine.keeps_memory(state.settings.keep_memory):
        await in_background(machine.release_memory)
    return paused


async def _reply_to(what: str, work: Callable[[], Awaitable[int | None]], **context: Any) -> Response:
    """Do ``work`` and reply as SGLang does, 200 or 400: success, message, and the number of paused requests."""
    try:
        paused = await work() or 0
    except (WeightsError, NotIdleError) as error:
        log.warning(f"not done: {what}", **context, reason=str(error))
        return JsonResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
    log.info(what, **context)
    return JsonResponse({"success": True, "message": what, "num_paused_requests": paused})


FROM_TENSORS = "__tensor__"
"""SGLang's path of an adapter that has none."""


class LoadAdapter(BaseModel):
    """Body of /load_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_path: str
    pinned: bool = False


class LoadAdapterFromTensors(BaseModel):
    """Body of /load_lora_adapter_from_tensors: PEFT's configuration, and a pickled dictionary of tensors in base64.

    There is one pickle for each tensor-parallel rank.
    """

    lora_name: str = Field(min_length=1)
    config_dict: dict[str, Any]
    serialized_named_tensors: list[str] = Field(min_length=1, max_length=1)
    pinned: bool = False


class UnloadAdapter(BaseModel):
    """Body of /unload_lora_adapter."""

    lora_name: str


class UpdateVersion(BaseModel):
    """Body of /update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


def add_adapter_routes(app: FastAPI) -> None:
    """Add the routes that load and unload an adapter and say which version is served."""

    @app.post("/load_lora_adapter", tags=["weights"])
    async def load_lora_adapter(body: LoadAdapter, http: Request) -> Response:
        """Load an adapter from a directory. Requests in flight end first, unless generation is paused."""
        state = state_of(http)
        model = state.loaded.model
        read = partial(read_adapter, Path(body.lora_path), model.architecture, model.device)
        return await _load_adapter(state, body.lora_name, body.lora_path, read)

    @app.post("/load_lora_adapter_from_tensors", tags=["weights"])
    async def load_lora_adapter_from_tensors(body: LoadAdapterFromTensors, http: Request) -> Response:
        """Load an adapter that comes with the request. Requests in flight end first, unless generation is paused."""
        state = state_of(http)

        def read() -> Adapter:
            model = state.loaded.model
            tensors = unpickle_tensors(_decoded(body.serialized_named_tensors[0]))
            return pack_adapter(body.config_dict, tensors, model.architecture, model.device, "the adapter")

        return await _load_adapter(state, body.lora_name, FROM_TENSORS, read)

    @app.post("/unload_lora_adapter", tags=["weights"])
    async def unload_lora_adapter(body: UnloadAdapter, http: Request) -> Response:
        """Remove the adapter; requests for it end as aborted unless another is loaded before a pause ends."""
        state = state_of(http)
        async with state.update_lock:
            if body.lora_name != state.engine.adapter_name:
                return _adapter_refusal(state, f"LoRA with name {body.lora_name} does not exist")
            return await _change_adapter(state, None, body.lora_name, "")

    @app.post("/update_weight_version", tags=["weights"])
    async def update_weight_version(body: UpdateVersion, http: Request) -> Response:
        """Say that the tokens from now on are of another version."""
        state = state_of(http)
        if body.abort_all_requests:
            await wait_for(state.engine.abort(lambda _: True, "the weight version changes"))
        await wait_for(state.engine.change_version(body.new_version))
        message = f"Weight version updated to {body.new_version}"
        return JsonResponse({"success": True, "message": message, "new_version": body.new_version})


async def _load_adapter(state: EngineState, name: str, path: str, read: Any) -> Response:
    async with state.update_lock:
        if state.engine.adapter_name is not None:
            return _adapter_refusal(state, f"{state.engine.adapter_name} is loaded already; unload it first")
        try:
            adapter = await in_background(read)
        except WeightsError as error:
            return _adapter_refusal(state, str(error))
        return await _change_adapter(state, adapter, name, path)


async def _change_adapter(state: EngineState, adapter: Adapter | None, name: str, path: str) -> Response:
    try:
        await wait_for(state.engine.change_adapter(adapter, name))
    except NotIdleError as error:
        return _adapter_refusal(state, str(error))
    state.adapter_path = path
    log.info("adapter loaded" if adapter else "adapter unloaded", name=name, path=path)
    return JsonResponse({"success": True, "loaded_adapters": _loaded_adapters(state)})


def _adapter_refusal(state: EngineState, message: str) -> Response:
    log.warning("adapter not changed", reason=message)
    return JsonResponse({"success": False, "error_message": message, "loaded_adapters": _loaded_adapters(state)}, 400)


def _loaded_adapters(state: EngineState) -> dict[str, str]:
    return {state.engine.adapter_name: state.adapter_path} if state.engine.adapter_name else {}
