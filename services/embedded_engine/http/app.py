"""The routes of SGLang that clients, the router and the trainer call, in front of the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import Response

from services.core.logs import get_logger
from services.core.tasks import in_background
from services.embedded_engine.compute import sequences
from services.embedded_engine.compute.batch import Limits
from services.embedded_engine.compute.broadcast import WeightsReceiver
from services.embedded_engine.compute.engine import Engine
from services.embedded_engine.compute.loading import load
from services.embedded_engine.http import openai_routes, sglang_wire, weight_routes
from services.embedded_engine.http.served import Served, served_by, wait_for
from services.http.app import JsonResponse, Stats, create_service_app, version
from services.http.lifecycle import Lifecycle
from services.http.problems import ProblemError
from services.rollout_server.settings import RolloutSettings

log = get_logger(__name__)

SERVICE = "rollout-engine"
FIRST_VERSION = "0"
DRAIN_SECONDS = 3.0
"""Requests in flight are aborted this long after SIGTERM, before the server ends them (services.http.server)."""


def create_app(settings: RolloutSettings) -> FastAPI:
    """The application; the model is loaded once it runs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loaded = await in_background(lambda: load(settings))
        loop = asyncio.get_running_loop()
        lifecycle: Lifecycle = app.state.lifecycle

        def fail(error: Exception) -> None:
            loop.call_soon_threadsafe(lifecycle.fail, error)

        model = loaded.model
        limits = Limits(loaded.max_running, settings.engine_max_queued_requests, settings.engine_prefill_tokens)
        engine = Engine(model, loaded.cache, limits, FIRST_VERSION, loaded.decode_text, on_failure=fail)
        engine.start()
        prompts = sglang_wire.PromptLimits(model.architecture.vocab_size, model.context_length, loaded.end_ids)
        receiver = WeightsReceiver(model.architecture, model.device)
        app.state.served = Served(
            loaded, engine, prompts, settings.model_name, settings.model_name, receiver, settings.keep_memory
        )
        log.info(
            "model loaded",
            model=settings.model_name,
            family=model.architecture.family,
            context_length=model.context_length,
        )
        drain = asyncio.create_task(_drain(lifecycle, engine))
        try:
            yield
        finally:
            drain.cancel()
            await asyncio.to_thread(engine.stop)
            receiver.close()

    def stats() -> Stats:
        served: Served = app.state.served
        return served.engine.stats()

    app = create_service_app(
        SERVICE,
        settings=settings,
        lifespan=lifespan,
        stats=stats,
        description="Generates completions: the part of SGLang's HTTP contract that this project uses.",
    )
    _add_generation(app)
    _add_information(app)
    weight_routes.add_routes(app)
    openai_routes.add_routes(app)
    return app


async def _drain(lifecycle: Lifecycle, engine: Engine) -> None:
    await lifecycle.draining.wait()
    await asyncio.sleep(DRAIN_SECONDS)
    engine.abort(lambda _: True, "the engine is stopping")


def _add_generation(app: FastAPI) -> None:
    @app.post("/generate", tags=["generation"])
    async def generate(body: sglang_wire.GenerateRequest, http: Request) -> Response:
        """Completions of a prompt, with SGLang's fields: an object, or a list of ``sampling_params.n`` objects."""
        served = served_by(http)
        sglang_wire.refuse_unsupported(body)
        params = sglang_wire.read_sampling(body.sampling_params)
        if (body.input_ids is None) == (body.text is None):
            raise ProblemError(400, "send the prompt either as input_ids or as text")
        prompt_ids = body.input_ids if body.input_ids is not None else served.loaded.encode(body.text or "")
        start = body.logprob_start_len if body.return_logprob and body.logprob_start_len >= 0 else None
        request = sglang_wire.make_request(
            prompt_ids,
            params,
            served.limits,
            rid=body.rid,
            logprob_start=start,
            top_logprobs=body.top_logprobs_num if body.return_logprob else 0,
        )
        done = await served.generate(request, http)
        records = sglang_wire.generate_reply(
            done, served.engine.version, served.loaded.decode_text, with_logprobs=body.return_logprob
        )
        return JsonResponse(records if params.n > 1 else records[0])

    @app.post("/abort_request", tags=["generation"])
    async def abort_request(body: sglang_wire.AbortRequest, http: Request) -> Response:
        """Ends a request, or all; what was sampled so far is their answer."""
        if not body.rid and not body.abort_all:
            raise ProblemError(400, "give a rid, or abort_all")

        def matches(sequence: sequences.Sequence) -> bool:
            return body.abort_all or body.rid in (sequence.request.rid, sequence.id)

        ended = await wait_for(served_by(http).engine.abort(matches, "aborted by request"))
        return JsonResponse({"success": True, "message": f"ended {ended} sequences"})


def _add_information(app: FastAPI) -> None:
    @app.get("/model_info", tags=["information"])
    @app.get("/get_model_info", tags=["information"], include_in_schema=False)
    async def model_info(http: Request) -> Response:
        """Which model is served, in which weight version."""
        served = served_by(http)
        architecture = served.loaded.model.architecture
        return JsonResponse(
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
        served = served_by(http)
        model = served.loaded.model
        return JsonResponse(
            {
                "model_path": served.model_path,
                "served_model_name": served.model_name,
                "weight_version": served.engine.version,
                "engine": "embedded",
                "version": version(),
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
