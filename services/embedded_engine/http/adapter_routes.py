"""SGLang's routes for LoRA adapters. One adapter can be loaded at a time; it replaces no weights."""

from __future__ import annotations

import base64
import binascii
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from services.core.logs import get_logger
from services.core.tasks import in_background
from services.embedded_engine.compute.adapters import Adapter, pack_adapter, read_adapter, unpickle_tensors
from services.embedded_engine.compute.engine import NotIdleError
from services.embedded_engine.compute.weights import WeightsError
from services.embedded_engine.http.state import EngineState, state_of, wait_for
from services.http.app import JsonResponse

log = get_logger(__name__)

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


def add_routes(app: FastAPI) -> None:
    """Add the routes that load and unload an adapter and say which version is served."""

    @app.post("/load_lora_adapter", tags=["weights"])
    async def load_lora_adapter(body: LoadAdapter, http: Request) -> Response:
        """Load an adapter from a directory. Requests in flight end first, unless generation is paused."""
        state = state_of(http)
        model = state.loaded.model
        read = partial(read_adapter, Path(body.lora_path), model.architecture, model.device)
        return await _load(state, body.lora_name, body.lora_path, read)

    @app.post("/load_lora_adapter_from_tensors", tags=["weights"])
    async def load_lora_adapter_from_tensors(body: LoadAdapterFromTensors, http: Request) -> Response:
        """Load an adapter that comes with the request. Requests in flight end first, unless generation is paused."""
        state = state_of(http)

        def read() -> Adapter:
            try:
                data = base64.b64decode(body.serialized_named_tensors[0], validate=True)
            except binascii.Error as error:
                raise WeightsError(f"serialized_named_tensors is not base64: {error}") from error
            model = state.loaded.model
            tensors = unpickle_tensors(data)
            return pack_adapter(body.config_dict, tensors, model.architecture, model.device, "the adapter")

        return await _load(state, body.lora_name, FROM_TENSORS, read)

    @app.post("/unload_lora_adapter", tags=["weights"])
    async def unload_lora_adapter(body: UnloadAdapter, http: Request) -> Response:
        """Remove the adapter; requests for it end as aborted unless another is loaded before a pause ends."""
        state = state_of(http)
        async with state.update_lock:
            if body.lora_name != state.engine.adapter_name:
                return _refusal(state, f"LoRA with name {body.lora_name} does not exist")
            return await _change(state, None, body.lora_name, "")

    @app.post("/update_weight_version", tags=["weights"])
    async def update_weight_version(body: UpdateVersion, http: Request) -> Response:
        """Say that the tokens from now on are of another version."""
        state = state_of(http)
        if body.abort_all_requests:
            await wait_for(state.engine.abort(lambda _: True, "the weight version changes"))
        await wait_for(state.engine.change_version(body.new_version))
        message = f"Weight version updated to {body.new_version}"
        return JsonResponse({"success": True, "message": message, "new_version": body.new_version})


async def _load(state: EngineState, name: str, path: str, read: Any) -> Response:
    async with state.update_lock:
        if state.engine.adapter_name is not None:
            return _refusal(state, f"{state.engine.adapter_name} is loaded already; unload it first")
        try:
            adapter = await in_background(read)
        except WeightsError as error:
            return _refusal(state, str(error))
        return await _change(state, adapter, name, path)


async def _change(state: EngineState, adapter: Adapter | None, name: str, path: str) -> Response:
    try:
        await wait_for(state.engine.change_adapter(adapter, name))
    except NotIdleError as error:
        return _refusal(state, str(error))
    state.adapter_path = path
    log.info("adapter loaded" if adapter else "adapter unloaded", name=name, path=path)
    return JsonResponse({"success": True, "loaded_adapters": _loaded(state)})


def _refusal(state: EngineState, message: str) -> Response:
    log.warning("adapter not changed", reason=message)
    return JsonResponse({"success": False, "error_message": message, "loaded_adapters": _loaded(state)}, 400)


def _loaded(state: EngineState) -> dict[str, str]:
    return {state.engine.adapter_name: state.adapter_path} if state.engine.adapter_name else {}
