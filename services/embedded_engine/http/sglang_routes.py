"""SGLang's routes that generate and inform."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import BaseModel, Field, model_validator

from services.embedded_engine.compute.loading import Loaded
from services.embedded_engine.compute.sequences import Request, Sequence
from services.embedded_engine.http.requests import RequestBody, SamplingParams, make_request, unsupported
from services.embedded_engine.http.state import state_of, wait_for
from services.http.app import version
from services.http.json_body import JsonResponse
from services.http.problems import ProblemError
from services.weights.broadcast_group import installed_nccl

_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {})
_WITHOUT_EFFECT = frozenset({"return_text_in_logprobs", "log_metrics", "modalities", "priority"})


class GenerateRequest(RequestBody):
    """Body of /generate."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    rid: str | None = Field(default=None, min_length=1, max_length=200)
    lora_path: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = Field(default=-1, ge=-1)
    top_logprobs_num: int = Field(default=0, ge=0, le=100)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, body: Any) -> Any:
        fields = body if isinstance(body, dict) else {}
        if fields.get("stream"):
            raise ProblemError(400, "the embedded engine streams on /v1/chat/completions and /v1/completions only")
        for name, value in fields.items():
            if name not in cls.model_fields and name not in _WITHOUT_EFFECT and value not in _NEUTRAL:
                raise unsupported(name)
        return body


class AbortRequest(BaseModel):
    """Body of /abort_request."""

    rid: str = ""
    abort_all: bool = False


def add_generation_routes(app: FastAPI) -> None:
    """Add the routes that generate completions and abort them."""

    @app.post("/generate", tags=["generation"])
    async def generate(body: GenerateRequest, http: HttpRequest) -> Response:
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
                "meta_info": _meta_info(sequence, state.engine.version, with_logprobs=body.return_logprob)
                | {"e2e_latency": seconds},
            }
            for sequence in request.sequences
        ]
        return JsonResponse(records if body.sampling_params.n > 1 else records[0])

    @app.post("/abort_request", tags=["generation"])
    async def abort_request(body: AbortRequest, http: HttpRequest) -> Response:
        """End a request, or all; their answers have the tokens sampled so far."""
        if not body.rid and not body.abort_all:
            raise ProblemError(400, "give a rid, or abort_all")

        def matches(sequence: Sequence) -> bool:
            return body.abort_all or body.rid in (sequence.request.rid, sequence.id)

        ended = await wait_for(state_of(http).engine.abort(matches, "aborted by request"))
        return JsonResponse({"success": True, "message": f"ended {ended} sequences"})


def add_information_routes(app: FastAPI) -> None:
    """Add the routes that describe the model and the engine."""

    @app.get("/model_info", tags=["information"])
    @app.get("/get_model_info", tags=["information"], include_in_schema=False)
    async def model_info(http: HttpRequest) -> Response:
        """Return the served model and its weight version."""
        state = state_of(http)
        architecture = state.loaded.model.architecture
        return JsonResponse(
            {
                "model_path": state.model_path,
                "tokenizer_path": state.settings.model_name,
                "is_generation": True,
                "weight_version": state.engine.version,
                "model_type": architecture.family,
                "vocab_size": architecture.vocab_size,
                "max_context_length": state.loaded.model.context_length,
            }
        )

    @app.get("/server_info", tags=["information"])
    @app.get("/get_server_info", tags=["information"], include_in_schema=False)
    async def server_info(http: HttpRequest) -> Response:
        """Return the engine's configuration and state."""
        state = state_of(http)
        model, cache = state.loaded.model, state.loaded.cache
        return JsonResponse(
            {
                "model_path": state.model_path,
                "served_model_name": state.settings.model_name,
                "weight_version": state.engine.version,
                "engine": "embedded",
                "version": version(),
                "tp_size": 1,
                "dp_size": 1,
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": str(model.device),
                "nccl_version": installed_nccl() if model.device.type == "cuda" else None,
                "context_length": model.context_length,
                "max_total_num_tokens": cache.max_tokens,
                "max_running_requests": cache.max_rows,
                "internal_states": [state.engine.stats()],
            }
        )


def completion_text(sequence: Sequence, loaded: Loaded, *, whole: bool = False) -> str:
    """Return a completion's text up to the stop string that ended it; ``whole``: with special tokens and stop token."""
    ids, finish = sequence.output_ids, sequence.finish or {}
    matched = finish.get("matched")
    if isinstance(matched, int) and not whole:
        ids = ids[:-1]
    text = loaded.decode_text(ids, sequence.request.stopping.skip_special_tokens and not whole)
    if isinstance(matched, str):
        text = text[: text.find(matched)]
    return text


def _meta_info(sequence: Sequence, engine_version: str, *, with_logprobs: bool) -> dict[str, Any]:
    request, count = sequence.request, len(sequence.output_ids)
    ends = [start for _, start in sequence.versions[1:]] + [count]
    meta: dict[str, Any] = {
        "id": sequence.id,
        "finish_reason": sequence.finish,
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": count,
        "cached_tokens": sequence.cached_tokens,
        # The version of the last token, or the engine's if there is no token.
        "weight_version": sequence.versions[-1][0] if sequence.versions else engine_version,
        "weight_versions": [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(sequence.versions, ends, strict=bool(sequence.versions))
        ],
    }
    return meta | (_logprobs(request, sequence) if with_logprobs else {})


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
