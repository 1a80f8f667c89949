"""The application of the embedded engine, with SGLang's routes that generate, inform and control, and OpenAI's."""

from __future__ import annotations

import asyncio
import time
from asyncio import wrap_future
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import BaseModel

from services.chat.messages import for_template
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.embedded_engine import weight_routes
from services.embedded_engine.engine import Engine, EngineStoppedError, NotIdleError, PauseMode, QueueFullError
from services.embedded_engine.loading import Loaded, load
from services.embedded_engine.requests import (
    ChatRequest,
    EngineState,
    GenerateRequest,
    completion_text,
    make_request,
    state_of,
)
from services.embedded_engine.scheduler import Request, Sequence
from services.embedded_engine.weights import WeightsError
from services.engines.settings import EngineSettings
from services.http.app import Lifecycle, Stats, create_service_app, version
from services.http.json_body import JsonRoute
from services.http.problems import ProblemError, printable, problem_response

log = get_logger(__name__)

SERVICE = "rollout-engine"
DRAIN_SECONDS = 3.0
"""The time that running requests still get at the end, before they are answered as aborted; below the service's own."""

REFUSALS = {QueueFullError: 429, EngineStoppedError: 503, NotIdleError: 400, WeightsError: 400}
"""The status by which a route answers that the engine refuses its work."""


def create_app(settings: EngineSettings) -> FastAPI:
    """Return the application; it loads the model once it runs."""

    def stats() -> Stats:
        state: EngineState = app.state.engine
        return state.engine.stats()

    app = create_service_app(
        SERVICE,
        settings=settings,
        lifespan=lambda app: _serve_model(app, settings),
        stats=stats,
        description="Generates completions: the part of SGLang's HTTP contract that this project uses.",
    )
    for refusal in REFUSALS:
        app.add_exception_handler(refusal, _on_refusal)
    app.include_router(router)
    app.include_router(weight_routes.router)
    return app


async def _on_refusal(http: HttpRequest, error: Exception) -> Response:
    """Return a problem document that also has the members of SGLang's refusals."""
    status, path, reason = REFUSALS[type(error)], printable(http.url.path), str(error)
    if status == 400:
        log.warning("refused", path=path, reason=reason)
    headers = None if status == 400 else {"Retry-After": "1"}
    members = {"success": False, "message": reason, "num_paused_requests": 0}
    return problem_response(status, reason, instance=path, headers=headers, **members)


@asynccontextmanager
async def _serve_model(app: FastAPI, settings: EngineSettings) -> AsyncIterator[None]:
    """Load the model and run the engine within the context."""
    loaded = await in_background(lambda: load(settings))
    model = loaded.model
    loop, lifecycle = asyncio.get_running_loop(), app.state.lifecycle

    def fail(error: Exception) -> None:
        loop.call_soon_threadsafe(lifecycle.fail, error)

    engine = Engine(loaded, on_failure=fail)
    engine.start()
    app.state.engine = EngineState(settings, loaded, engine, model_path=settings.model_name)
    app.state.receiver = weight_routes.WeightsReceiver(model.architecture, model.device)
    log.info(
        "model loaded",
        model=settings.model_name,
        family=model.architecture.family,
        context_length=model.context_length,
    )
    drain = asyncio.create_task(_abort_after_drain(lifecycle, engine))
    try:
        yield
    finally:
        drain.cancel()
        await asyncio.to_thread(engine.stop)
        app.state.receiver.close()
        log.info("engine stopped", generated_tokens=engine.stats()["generated_tokens"])


async def _abort_after_drain(lifecycle: Lifecycle, engine: Engine) -> None:
    await lifecycle.draining.wait()
    await asyncio.sleep(DRAIN_SECONDS)
    engine.abort(lambda _: True, "the engine is stopping")


router = APIRouter(route_class=JsonRoute)

# --- SGLang's routes that generate and inform ---


@router.post("/generate", tags=["generation"])
async def generate(body: GenerateRequest, http: HttpRequest) -> Any:
    """Generate completions of a prompt: an object, or a list of ``sampling_params.n`` objects."""
    state = state_of(http)
    if (body.input_ids is None) == (body.text is None):
        raise ProblemError(400, "send the prompt either as input_ids or as text")
    request = make_request(
        body.input_ids if body.input_ids is not None else state.loaded.encode(body.text or ""),
        body.sampling_params,
        state.loaded,
        rid=body.rid,
        use_adapter=state.uses_adapter(body.lora_path),
        logprob_start=body.logprob_start_len if body.return_logprob and body.logprob_start_len >= 0 else None,
        top_logprobs=body.top_logprobs_num if body.return_logprob else 0,
    )
    await state.generate(request, http)
    seconds = time.perf_counter() - request.started
    records = [
        {
            "text": completion_text(sequence, state.loaded),
            "output_ids": sequence.output_ids,
            "meta_info": _meta_info(sequence, state.engine.version)
            | (_logprobs(request, sequence) if body.return_logprob else {})
            | {"e2e_latency": seconds},
        }
        for sequence in request.sequences
    ]
    return records if body.sampling_params.n > 1 else records[0]


def _meta_info(sequence: Sequence, engine_version: str) -> dict[str, Any]:
    count = len(sequence.output_ids)
    ends = [start for _, start in sequence.versions[1:]] + [count]
    return {
        "id": sequence.id,
        "finish_reason": sequence.finish,
        "prompt_tokens": len(sequence.request.prompt_ids),
        "completion_tokens": count,
        "cached_tokens": sequence.cached_tokens,
        # The version of the last token, or the engine's if there is no token.
        "weight_version": sequence.versions[-1][0] if sequence.versions else engine_version,
        "weight_versions": [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(sequence.versions, ends, strict=bool(sequence.versions))
        ],
    }


def _logprobs(request: Request, sequence: Sequence) -> dict[str, Any]:
    """Return the log-probabilities that the request asks for, as triples (log-probability, token id, None)."""
    fields: dict[str, Any] = {
        "output_token_logprobs": [
            [logprob, token, None] for logprob, token in zip(sequence.logprobs, sequence.output_ids, strict=True)
        ]
    }
    if request.logprob_start is not None:
        tokens = request.prompt_ids[request.logprob_start :]
        # A request that was aborted before its prefill has none.
        is_computed = bool(request.input_logprobs)
        fields["input_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(request.input_logprobs, tokens, strict=is_computed)
        ]
    if request.top_logprobs:
        fields["output_top_logprobs"] = [
            [[logprob, token, None] for logprob, token in place] for place in sequence.top_logprobs
        ]
    return fields


@router.get("/model_info", tags=["information"])
@router.get("/get_model_info", tags=["information"], include_in_schema=False)
async def model_info(http: HttpRequest) -> Any:
    """Return the served model and its weight version."""
    state = state_of(http)
    architecture = state.loaded.model.architecture
    return {
        "model_path": state.model_path,
        "tokenizer_path": state.settings.model_name,
        "is_generation": True,
        "weight_version": state.engine.version,
        "model_type": architecture.family,
        "vocab_size": architecture.vocab_size,
        "max_context_length": state.loaded.model.context_length,
    }


@router.get("/server_info", tags=["information"])
@router.get("/get_server_info", tags=["information"], include_in_schema=False)
async def server_info(http: HttpRequest) -> Any:
    """Return the engine's configuration and state."""
    state = state_of(http)
    model, cache = state.loaded.model, state.loaded.cache
    return {
        "model_path": state.model_path,
        "served_model_name": state.settings.model_name,
        "weight_version": state.engine.version,
        "engine": "embedded",
        "version": version(),
        "tp_size": 1,
        "dp_size": 1,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "context_length": model.context_length,
        "max_total_num_tokens": cache.max_tokens,
        "max_running_requests": cache.max_rows,
        "internal_states": [state.engine.stats()],
    }


# --- SGLang's routes that control ---


class PauseRequest(BaseModel):
    """Body of /pause_generation."""

    mode: PauseMode = "abort"


@router.post("/pause_generation", tags=["control"])
async def pause_generation(body: PauseRequest, http: HttpRequest) -> Any:
    """Stop decoding: ``abort`` ends requests, ``retract`` computes them anew later."""
    paused = await wrap_future(state_of(http).engine.pause(body.mode))
    return {"success": True, "message": f"paused {paused} sequences"}


@router.post("/continue_generation", tags=["control"])
async def continue_generation(http: HttpRequest) -> Any:
    """Continue decoding."""
    await wrap_future(state_of(http).engine.resume())
    return {"success": True, "message": "generation continues"}


@router.post("/release_memory_occupation", tags=["control"])
async def release_memory_occupation(http: HttpRequest) -> Any:
    """Give the memory of keys and values away; refused unless generation is paused with retract or abort."""
    await wrap_future(state_of(http).engine.occupy(has_memory=False))
    log.info("memory released")
    return Response()


@router.post("/resume_memory_occupation", tags=["control"])
async def resume_memory_occupation(http: HttpRequest) -> Any:
    """Take the memory of keys and values back; refused unless it was released."""
    await wrap_future(state_of(http).engine.occupy(has_memory=True))
    log.info("memory taken back")
    return Response()


@router.post("/flush_cache", tags=["control"])
@router.get("/flush_cache", tags=["control"], include_in_schema=False)
async def flush_cache(http: HttpRequest) -> Any:
    """Drop cached prompts; refused while requests run."""
    await wrap_future(state_of(http).engine.flush())
    return {"success": True, "message": "cache flushed"}


# --- OpenAI's routes ---


@router.get("/v1/models", tags=["openai"])
async def models(http: HttpRequest) -> Any:
    """List the served model and its LoRA adapter."""
    state = state_of(http)
    model = {
        "id": state.settings.model_name,
        "object": "model",
        "created": int(state.started),
        "owned_by": "embedded",
        "root": state.model_path,
        "max_model_len": state.loaded.model.context_length,
    }
    adapter = {"id": state.engine.adapter_name, "root": state.adapter_path, "parent": model["id"]}
    adapters = [{**model, **adapter, "max_model_len": None}] if state.engine.adapter_name else []
    return {"object": "list", "data": [model, *adapters]}


@router.post("/v1/chat/completions", tags=["openai"])
async def chat_completions(body: ChatRequest, http: HttpRequest) -> Any:
    """Answer a conversation, with ``logprobs`` if they are asked for."""
    state = state_of(http)
    loaded = state.loaded
    text = loaded.prompts.render([for_template(one) for one in body.messages], None, body.chat_template_kwargs)
    # The adapter's name stands after a colon in the model's, as in SGLang, or by itself.
    use_adapter = state.uses_adapter(body.model.partition(":")[2] or body.lora_path)
    request = make_request(loaded.prompts.codec.encode(text), body, loaded, rid=body.rid, use_adapter=use_adapter)
    await state.generate(request, http)
    prompt, sampled = len(request.prompt_ids), sum(len(sequence.output_ids) for sequence in request.sequences)
    return {
        "id": request.rid,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model or state.settings.model_name,
        "choices": [
            {
                "index": sequence.number,
                "message": {"role": "assistant", "content": completion_text(sequence, loaded)},
                "logprobs": {"content": _entries(sequence, loaded)} if body.logprobs else None,
                "finish_reason": (sequence.finish or {}).get("type"),
            }
            for sequence in request.sequences
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
        "metadata": {"weight_version": state.engine.version},
    }


def _entries(sequence: Sequence, loaded: Loaded) -> list[dict[str, Any]]:
    return [
        {"token": loaded.decode_text([token], False), "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(sequence.output_ids, sequence.logprobs, strict=True)
    ]
