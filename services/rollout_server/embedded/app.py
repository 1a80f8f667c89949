"""The routes of SGLang that clients, the router and the trainer call, in front of the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response

from services import scaffold
from services.logs import get_logger
from services.problems import ProblemError
from services.protocol import Health
from services.rollout_server.embedded import sequences, wire
from services.rollout_server.embedded.engine import (
    Engine,
    EngineStoppedError,
    Limits,
    NotIdleError,
    QueueFullError,
)
from services.rollout_server.embedded.loading import Loaded, load
from services.rollout_server.embedded.weights import WeightsError
from services.rollout_server.settings import RolloutSettings

log = get_logger(__name__)
T = TypeVar("T")

SERVICE = "rollout-engine"
FIRST_VERSION = "0"
# Of the five seconds that the scaffold gives requests in flight at the end: after these they come back aborted.
DRAIN_SECONDS = 3.0


@dataclass
class Served:
    """What the routes work on."""

    loaded: Loaded
    engine: Engine
    limits: wire.PromptLimits
    model_path: str
    model_name: str
    update_lock: asyncio.Lock

    async def generate(self, request: sequences.Request, http: Request) -> sequences.Request:
        """Has the engine do a request; it is aborted if its client leaves.

        Raises:
            ProblemError: 429 when too many requests wait, 503 when the engine ends.
        """
        self.submit(request)
        done = asyncio.wrap_future(request.done)
        gone = asyncio.create_task(_disconnected(http))
        try:
            both: set[asyncio.Future[Any]] = {done, gone}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                self.abort(request, "the client left")
            return await done
        except EngineStoppedError as error:
            raise ProblemError(503, str(error), headers={"Retry-After": "1"}) from error
        finally:
            gone.cancel()

    def submit(self, request: sequences.Request) -> None:
        """Gives a request to the engine.

        Raises:
            ProblemError: 429 when too many requests wait, 503 when the engine ends.
        """
        try:
            self.engine.submit(request)
        except QueueFullError as error:
            raise ProblemError(429, f"{error}; send it later or elsewhere", headers={"Retry-After": "1"}) from error
        except EngineStoppedError as error:
            raise ProblemError(503, str(error), headers={"Retry-After": "1"}) from error

    def abort(self, request: sequences.Request, reason: str) -> None:
        """Has the engine end a request."""
        self.engine.abort(lambda sequence: sequence.request is request, reason)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def wait_for(future: Future[T]) -> T:
    """The result of what the engine's thread does.

    Raises:
        ProblemError: 503 when the engine ends.
    """
    try:
        return await asyncio.wrap_future(future)
    except EngineStoppedError as error:
        raise ProblemError(503, str(error), headers={"Retry-After": "1"}) from error


def create_app(settings: RolloutSettings) -> FastAPI:
    """The application; the model is loaded once it runs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loaded = await scaffold.in_background(lambda: load(settings))
        loop = asyncio.get_running_loop()
        lifecycle: scaffold.Lifecycle = app.state.lifecycle

        def fail(error: Exception) -> None:
            loop.call_soon_threadsafe(lifecycle.fail, error)

        limits = Limits(loaded.max_running, settings.engine_max_queued_requests, settings.engine_prefill_tokens)
        engine = Engine(
            loaded.model,
            loaded.cache,
            limits,
            FIRST_VERSION,
            loaded.decode_text,
            on_failure=fail,
        )
        engine.start()
        model = loaded.model
        prompts = wire.PromptLimits(model.architecture.vocab_size, model.context_length, loaded.end_ids)
        app.state.served = Served(loaded, engine, prompts, settings.model_name, settings.model_name, asyncio.Lock())
        log.info(
            "model loaded",
            model=settings.model_name,
            family=model.architecture.family,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            context_length=model.context_length,
        )
        drain = asyncio.create_task(_drain(lifecycle, engine))
        try:
            yield
        finally:
            drain.cancel()
            await asyncio.to_thread(engine.stop)

    def served() -> Served:
        found: Served = app.state.served
        return found

    app = scaffold.create_app(
        SERVICE,
        settings=settings,
        lifespan=lifespan,
        health=lambda: Health(status="healthy", service=SERVICE),
        stats=lambda: served().engine.stats(),
        description="Generates completions: the part of SGLang's HTTP contract that this project uses.",
    )
    _add_generation(app)
    _add_information(app)
    _add_control(app)
    return app


async def _drain(lifecycle: scaffold.Lifecycle, engine: Engine) -> None:
    await lifecycle.draining.wait()
    await asyncio.sleep(DRAIN_SECONDS)
    engine.abort(lambda _: True, "the engine is stopping")
    if engine.is_paused:
        engine.resume()


def _served(http: Request) -> Served:
    served: Served = http.app.state.served
    return served


def _add_generation(app: FastAPI) -> None:
    @app.post("/generate", tags=["generation"])
    async def generate(body: wire.GenerateRequest, http: Request) -> Response:
        """Completions of a prompt, with SGLang's fields: an object, or a list of ``sampling_params.n`` objects."""
        served = _served(http)
        wire.refuse_unsupported(body)
        params = wire.read_sampling(body.sampling_params)
        if (body.input_ids is None) == (body.text is None):
            raise ProblemError(400, "send the prompt either as input_ids or as text")
        prompt_ids = body.input_ids if body.input_ids is not None else served.loaded.encode(body.text or "")
        start = body.logprob_start_len if body.return_logprob and body.logprob_start_len >= 0 else None
        request = wire.make_request(
            prompt_ids,
            params,
            served.limits,
            rid=body.rid,
            logprob_start=start,
            top_logprobs=body.top_logprobs_num if body.return_logprob else 0,
        )
        done = await served.generate(request, http)
        records = wire.generate_reply(
            done, served.engine.version, served.loaded.decode_text, with_logprobs=body.return_logprob
        )
        return scaffold.JsonResponse(records if params.n > 1 else records[0])

    @app.post("/abort_request", tags=["generation"])
    async def abort_request(body: wire.AbortRequest, http: Request) -> Response:
        """Ends a request, or all; what was sampled so far is their answer."""
        if not body.rid and not body.abort_all:
            raise ProblemError(400, "give a rid, or abort_all")

        def matches(sequence: sequences.Sequence) -> bool:
            return body.abort_all or body.rid in (sequence.request.rid, sequence.id)

        ended = await wait_for(_served(http).engine.abort(matches, "aborted by request"))
        return scaffold.JsonResponse({"success": True, "message": f"ended {ended} sequences"})


def _add_information(app: FastAPI) -> None:
    @app.get("/model_info", tags=["information"])
    @app.get("/get_model_info", tags=["information"], include_in_schema=False)
    async def model_info(http: Request) -> Response:
        """Which model is served, in which weight version."""
        served = _served(http)
        architecture = served.loaded.model.architecture
        return scaffold.JsonResponse(
            {
                "model_path": served.model_path,
                "tokenizer_path": served.model_name,
                "is_generation": True,
                "weight_version": served.engine.version,
                "model_type": architecture.family,
                "vocab_size": architecture.vocab_size,
                "max_context_length": served.loaded.model.context_length,
            }
        )

    @app.get("/server_info", tags=["information"])
    @app.get("/get_server_info", tags=["information"], include_in_schema=False)
    async def server_info(http: Request) -> Response:
        """How the engine is set up and what it does now."""
        served = _served(http)
        model = served.loaded.model
        return scaffold.JsonResponse(
            {
                "model_path": served.model_path,
                "served_model_name": served.model_name,
                "weight_version": served.engine.version,
                "engine": "embedded",
                "version": scaffold.version(),
                "tp_size": 1,
                "dp_size": 1,
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": str(model.device),
                "context_length": model.context_length,
                "max_total_num_tokens": served.loaded.cache.max_tokens,
                "max_running_requests": served.loaded.max_running,
                "internal_states": [served.engine.stats()],
            }
        )


def _add_control(app: FastAPI) -> None:
    @app.post("/pause_generation", tags=["control"])
    async def pause_generation(body: wire.PauseRequest, http: Request) -> Response:
        """Stops decoding: ``abort`` ends requests, ``retract`` computes them anew later, ``in_place`` keeps them."""
        paused = await wait_for(_served(http).engine.pause(body.mode))
        return scaffold.JsonResponse({"success": True, "message": f"paused {paused} sequences"})

    @app.post("/continue_generation", tags=["control"])
    async def continue_generation(http: Request) -> Response:
        """Goes on decoding."""
        await wait_for(_served(http).engine.resume())
        return scaffold.JsonResponse({"success": True, "message": "generation continues"})

    @app.post("/flush_cache", tags=["control"])
    @app.get("/flush_cache", tags=["control"], include_in_schema=False)
    async def flush_cache(http: Request) -> Response:
        """Forgets what is kept of prompts; refused while requests run."""
        try:
            await wait_for(_served(http).engine.flush())
        except NotIdleError as error:
            raise ProblemError(400, str(error)) from error
        return scaffold.JsonResponse({"success": True, "message": "cache flushed"})

    @app.post("/update_weights_from_disk", tags=["weights"])
    async def update_weights_from_disk(body: wire.UpdateFromDisk, http: Request) -> Response:
        """Serves a model directory's weights from the next step on, or, when they do not fit, changes nothing.

        They are read beside the ones in use. Requests in flight end first, unless generation is paused.
        """
        served = _served(http)
        async with served.update_lock:
            try:
                weights = await scaffold.in_background(lambda: served.loaded.read_weights(Path(body.model_path)))
                if body.abort_all_requests:
                    await wait_for(served.engine.abort(lambda _: True, "the weights change"))
                version = body.weight_version if body.weight_version is not None else served.engine.version
                paused = await wait_for(
                    served.engine.change_weights(weights, version, keeps_caches=not body.flush_cache)
                )
            except (WeightsError, NotIdleError) as error:
                log.warning("weights not updated", model_path=body.model_path, reason=str(error))
                return update_reply(str(error), success=False)
            served.model_path = body.model_path
        log.info("weights updated", model_path=body.model_path, weight_version=version, paused=paused)
        return update_reply("weights updated", success=True, num_paused_requests=paused)


def update_reply(message: str, *, success: bool, **more: Any) -> Response:
    """SGLang's reply to a weight update."""
    content = {"success": success, "message": message, "num_paused_requests": 0, **more}
    return scaffold.JsonResponse(content, 200 if success else 400)
