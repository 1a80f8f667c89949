"""The routes of SGLang that pause generation and change weights.

Weights change as a whole between two steps or not at all, and the version with them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from torch.distributed import ProcessGroup

from services.core import memory
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.embedded_engine.compute.engine import NotIdleError
from services.embedded_engine.compute.model import Weights
from services.embedded_engine.compute.weights import WeightsError
from services.embedded_engine.http import sglang_wire
from services.embedded_engine.http.served import Served, served_by, wait_for
from services.http.app import JsonResponse
from services.http.problems import ProblemError

log = get_logger(__name__)


def add_routes(app: FastAPI) -> None:
    """Adds them."""
    _add_pauses(app)
    _add_disk_update(app)
    _add_broadcast_update(app)


def _add_pauses(app: FastAPI) -> None:
    @app.post("/pause_generation", tags=["control"])
    async def pause_generation(body: sglang_wire.PauseRequest, http: Request) -> Response:
        """Stops decoding: ``abort`` ends requests, ``retract`` computes them anew later, ``in_place`` keeps them."""
        paused = await wait_for(served_by(http).engine.pause(body.mode))
        return JsonResponse({"success": True, "message": f"paused {paused} sequences"})

    @app.post("/continue_generation", tags=["control"])
    async def continue_generation(http: Request) -> Response:
        """Goes on decoding."""
        await wait_for(served_by(http).engine.resume())
        return JsonResponse({"success": True, "message": "generation continues"})

    @app.post("/flush_cache", tags=["control"])
    @app.get("/flush_cache", tags=["control"], include_in_schema=False)
    async def flush_cache(http: Request) -> Response:
        """Forgets what is kept of prompts; refused while requests run."""
        try:
            await wait_for(served_by(http).engine.flush())
        except NotIdleError as error:
            raise ProblemError(400, str(error)) from error
        return JsonResponse({"success": True, "message": "cache flushed"})


def _add_disk_update(app: FastAPI) -> None:
    @app.post("/update_weights_from_disk", tags=["weights"])
    async def update_weights_from_disk(body: sglang_wire.UpdateFromDisk, http: Request) -> Response:
        """Serves a model directory's weights from the next step on, or, when they do not fit, changes nothing.

        They are read beside the ones in use. Requests in flight end first, unless generation is paused.
        """
        served = served_by(http)

        async def update() -> int:
            path = Path(body.model_path)
            weights = await in_background(lambda: served.loaded.read_weights(path))
            if body.abort_all_requests:
                await wait_for(served.engine.abort(lambda _: True, "the weights change"))
            paused = await _change(served, weights, body.weight_version, flush_cache=body.flush_cache)
            served.model_path = body.model_path
            return paused

        async with served.update_lock:
            return await _told("weights updated from disk", update, model_path=body.model_path)


def _add_broadcast_update(app: FastAPI) -> None:
    @app.post("/init_weights_update_group", tags=["weights"])
    async def init_weights_update_group(body: sglang_wire.InitGroup, http: Request) -> Response:
        """Joins a broadcast group whose rank 0 is the trainer; answers when all its members have joined.

        A group of the same name is left first.
        """
        served = served_by(http)

        def meet() -> ProcessGroup:
            return served.receiver.meet(
                body.master_address,
                body.master_port,
                body.rank_offset,
                body.world_size,
                body.group_name,
                body.backend,
            )

        async def join() -> None:
            async with served.receiver_lock:
                served.receiver.leave(body.group_name)
            # Without the lock: members that never come would keep the next update waiting.
            served.receiver.join(body.group_name, await in_background(meet))

        return await _told("group joined", join, group=body.group_name)

    @app.post("/destroy_weights_update_group", tags=["weights"])
    async def destroy_weights_update_group(body: sglang_wire.DestroyGroup, http: Request) -> Response:
        """Leaves a broadcast group."""
        served = served_by(http)

        async def leave() -> None:
            if not served.receiver.leave(body.group_name):
                raise WeightsError(f"group {body.group_name!r} is not joined")

        async with served.receiver_lock:
            return await _told("group left", leave, group=body.group_name)

    @app.post("/begin_weight_update", tags=["weights"])
    async def begin_weight_update(body: sglang_wire.BeginUpdate, http: Request) -> Response:
        """Opens an update by broadcast. Requests in flight end first, unless generation is paused."""
        served = served_by(http)
        async with served.receiver_lock:
            await wait_for(served.engine.drain())
            served.receiver.begin()
        return update_reply("update open", success=True)

    @app.post("/update_weights_from_distributed", tags=["weights"])
    async def update_weights_from_distributed(body: sglang_wire.UpdateFromDistributed, http: Request) -> Response:
        """Receives tensors in the order of ``names``; they serve once /end_weight_update closes the update."""
        served = served_by(http)

        def receive() -> None:
            served.receiver.receive(
                body.names,
                body.dtypes,
                body.shapes,
                body.group_name,
                version=body.weight_version,
                flush_cache=body.flush_cache,
            )

        async with served.receiver_lock:
            return await _told("weights received", lambda: in_background(receive), tensors=len(body.names))

    @app.post("/end_weight_update", tags=["weights"])
    async def end_weight_update(http: Request) -> Response:
        """Serves what was received since /begin_weight_update; when that is not all of the model, changes nothing.

        Requests in flight end first, unless generation is paused.
        """
        served = served_by(http)

        async def end() -> int:
            update = served.receiver.end()
            if not update.tensors:
                return 0
            weights = await in_background(lambda: served.loaded.pack(update.tensors))
            async with served.update_lock:
                return await _change(served, weights, update.version, flush_cache=update.flush_cache)

        async with served.receiver_lock:
            return await _told("broadcast update closed", end)


async def _change(served: Served, weights: Weights, version: str | None, *, flush_cache: bool) -> int:
    """Exchanges weights and version; returns how many sequences are paused."""
    change = served.engine.change_weights(
        weights, served.engine.version if version is None else version, keeps_caches=not flush_cache
    )
    paused = await wait_for(change)
    if not served.keep_memory:
        await in_background(memory.release)
    return paused


async def _told(what: str, work: Callable[[], Awaitable[int | None]], **context: Any) -> Response:
    """Does ``work`` and answers as SGLang does: success, message, and how many requests are paused; 200 or 400."""
    try:
        paused = await work()
    except (WeightsError, NotIdleError) as error:
        log.warning(f"not done: {what}", **context, reason=str(error))
        return update_reply(str(error), success=False)
    log.info(what, **context)
    return update_reply(what, success=True, paused=paused or 0)


def update_reply(message: str, *, success: bool, paused: int = 0) -> Response:
    """SGLang's reply to a weight update."""
    content = {"success": success, "message": message, "num_paused_requests": paused}
    return JsonResponse(content, 200 if success else 400)
