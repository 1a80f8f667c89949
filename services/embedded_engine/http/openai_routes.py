"""OpenAI's chat and text completions in front of the embedded engine, for OpenAI clients and agent libraries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from services.core.logs import get_logger
from services.embedded_engine.compute import sequences
from services.embedded_engine.http.openai_replies import ChatReplies, ChoiceStream, TextReplies, usage
from services.embedded_engine.http.openai_requests import ChatRequest, CompletionRequest, OpenAIRequest
from services.embedded_engine.http.requests import make_request
from services.embedded_engine.http.state import EngineState, state_of
from services.http.app import JsonResponse

log = get_logger(__name__)

Progress = asyncio.Queue[tuple[sequences.Sequence, int]]
"""A sequence and its number of tokens, each time that there is a new token."""


def add_routes(app: FastAPI) -> None:
    """Add OpenAI's routes."""

    @app.get("/v1/models", tags=["openai"])
    async def models(http: Request) -> Response:
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
        return JsonResponse({"object": "list", "data": [model, *adapters]})

    @app.post("/v1/chat/completions", tags=["openai"])
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        """Answer a conversation; with ``tools``, the model's calls come as tool calls."""
        state = state_of(http)
        top_logprobs = body.top_logprobs if body.logprobs else None
        model = body.model or state.settings.model_name
        replies = ChatReplies(model, state.loaded, top_logprobs, body.offered_tools)
        prompt_ids = body.prompt_ids(state.loaded.tokenizer)
        _warn_of_dropped(state, body)
        return await _answer(state, http, body, replies, [prompt_ids])

    @app.post("/v1/completions", tags=["openai"])
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continue a text, or several."""
        state = state_of(http)
        replies = TextReplies(body.model or state.settings.model_name, state.loaded, body.logprobs)
        return await _answer(state, http, body, replies, body.prompts(state.loaded.tokenizer))


def _warn_of_dropped(state: EngineState, body: ChatRequest) -> None:
    """Log once what the model's chat template drops. Such requests are answered, as SGLang answers them."""
    for name in body.dropped_by(state.loaded.tokenizer):
        if name not in state.warned_of:
            state.warned_of.add(name)
            log.warning(
                f"the model never sees the {name} of requests: its chat template drops them",
                model=state.settings.model_name,
                remedy=f"give its directory a chat_template.jinja that renders {name}",
            )


async def _answer(
    state: EngineState, http: Request, body: OpenAIRequest, replies: TextReplies, prompts: list[list[int]]
) -> Response:
    progress: Progress = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def on_progress(sequence: sequences.Sequence) -> None:
        loop.call_soon_threadsafe(progress.put_nowait, (sequence, len(sequence.output_ids)))

    requests = [
        make_request(
            prompt,
            body,
            state.loaded,
            rid=body.rid if len(prompts) == 1 else None,
            use_adapter=state.uses_adapter(body.adapter),
            top_logprobs=replies.top_logprobs or 0,
            on_progress=on_progress if body.stream else None,
        )
        for prompt in prompts
    ]
    if not body.stream:
        await asyncio.gather(*(state.generate(request, http) for request in requests))
        return JsonResponse(replies.whole(requests, state.engine.version))
    # Before the stream begins, so that a refusal has its status.
    for request in requests:
        state.submit(request)
    chunks = _stream(state, replies, requests, progress, includes_usage=body.stream_options.include_usage)
    return StreamingResponse(chunks, media_type="text/event-stream")


async def _stream(
    state: EngineState,
    replies: TextReplies,
    requests: list[sequences.Request],
    progress: Progress,
    *,
    includes_usage: bool,
) -> AsyncIterator[bytes]:
    """Yield server-sent events: the text as it is generated, its end, the token counts if wanted, and [DONE]."""
    everything = [sequence for request in requests for sequence in request.sequences]
    streams = {sequence: ChoiceStream(index, sequence, replies) for index, sequence in enumerate(everything)}
    try:
        for stream in streams.values():
            for choice in stream.opening():
                yield _event(replies.chunk(requests, [choice]))
        while not all(stream.is_done for stream in streams.values()):
            sequence, count = await progress.get()
            if not streams[sequence].is_done:
                for choice in streams[sequence].advance(count):
                    yield _event(replies.chunk(requests, [choice]))
        if includes_usage:
            yield _event(replies.chunk(requests, [], usage=usage(requests)))
        yield b"data: [DONE]\n\n"
    finally:
        for request in requests:
            if not request.done.done():
                state.abort(request, "the client left")


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
