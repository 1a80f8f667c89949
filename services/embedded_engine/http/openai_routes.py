"""OpenAI's chat and text completions in front of the embedded engine, for OpenAI clients and agent libraries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from tokenizers.decoders import DecodeStream

from services.core.logs import get_logger
from services.embedded_engine.compute import sequences
from services.embedded_engine.http import sglang_wire, tool_calls
from services.embedded_engine.http.openai_replies import Chat, Dialect, Text, usage
from services.embedded_engine.http.openai_requests import ChatRequest, CompletionRequest, OpenAIRequest
from services.embedded_engine.http.served import Served, served_by
from services.http.app import JsonResponse

log = get_logger(__name__)


def add_routes(app: FastAPI) -> None:
    """Adds them."""

    @app.get("/v1/models", tags=["openai"])
    async def models(http: Request) -> Response:
        """The model that is served."""
        served = served_by(http)
        model = {
            "id": served.model_name,
            "object": "model",
            "created": int(served.started),
            "owned_by": "embedded",
            "root": served.model_path,
            "max_model_len": served.loaded.model.context_length,
        }
        return JsonResponse({"object": "list", "data": [model]})

    @app.post("/v1/chat/completions", tags=["openai"])
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        """Answers a conversation; with ``tools``, calls that the model makes come as tool calls."""
        served = served_by(http)
        has_tools = body.offered_tools is not None
        top = (body.top_logprobs or 0) if body.logprobs else None
        dialect = Chat(body.model or served.model_name, served.loaded, top, has_tools=has_tools)
        prompt_ids = body.prompt_ids(served.loaded.tokenizer)
        _warn_of_dropped(served, body)
        return await _answer(served, http, body, dialect, [prompt_ids], body.params())

    @app.post("/v1/completions", tags=["openai"])
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continues a text, or several."""
        served = served_by(http)
        dialect = Text(body.model or served.model_name, served.loaded, body.logprobs)
        return await _answer(served, http, body, dialect, body.prompts(served.loaded.tokenizer), body.params())


def _warn_of_dropped(served: Served, body: ChatRequest) -> None:
    """Log once what the model's chat template drops. Such requests are answered, as SGLang answers them."""
    for name in body.dropped_by(served.loaded.tokenizer):
        if name not in served.warned_of:
            served.warned_of.add(name)
            log.warning(
                f"the model never sees the {name} of requests: its chat template drops them",
                model=served.model_name,
                remedy=f"give its directory a chat_template.jinja that renders {name}",
            )


async def _answer(
    served: Served,
    http: Request,
    body: OpenAIRequest,
    dialect: Dialect,
    prompts: list[list[int]],
    params: sglang_wire.SamplingParams,
) -> Response:
    queue: asyncio.Queue[tuple[sequences.Sequence, int]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def on_progress(sequence: sequences.Sequence) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, (sequence, len(sequence.output_ids)))

    requests = [
        sglang_wire.make_request(
            prompt,
            params,
            served.limits,
            rid=body.rid if len(prompts) == 1 else None,
            top_logprobs=dialect.top_logprobs or 0,
            on_progress=on_progress if body.stream else None,
        )
        for prompt in prompts
    ]
    if body.stream:
        # Refusals come before the stream begins, so that they have a status.
        for request in requests:
            served.submit(request)
        chunks = _stream(served, dialect, requests, queue, includes_usage=body.includes_usage)
        return StreamingResponse(chunks, media_type="text/event-stream")
    await asyncio.gather(*(served.generate(request, http) for request in requests))
    return JsonResponse(dialect.reply(requests, served.engine.version))


async def _stream(
    served: Served,
    dialect: Dialect,
    requests: list[sequences.Request],
    queue: asyncio.Queue[tuple[sequences.Sequence, int]],
    *,
    includes_usage: bool,
) -> AsyncIterator[bytes]:
    """Server-sent events: the text as it is made, its end, perhaps the token counts, and [DONE]."""
    everything = [sequence for request in requests for sequence in request.sequences]
    speakers = {id(sequence): _Speaker(sequence, index, dialect, served) for index, sequence in enumerate(everything)}
    identifier = requests[0].rid
    left = len(everything)
    try:
        for speaker in speakers.values():
            for delta in dialect.opening():
                yield _event(dialect.chunk(identifier, speaker.index, delta, None, None))
        while left:
            sequence, count = await queue.get()
            speaker = speakers[id(sequence)]
            if speaker.is_done:
                continue
            for chunk in speaker.advance(identifier, count):
                yield _event(chunk)
            left -= speaker.is_done
        if includes_usage:
            yield _event(dialect.usage_chunk(identifier, usage(requests)))
        yield b"data: [DONE]\n\n"
    finally:
        for request in requests:
            if not request.done.done():
                served.abort(request, "the client left")


class _Speaker:
    """What of one completion has been sent, and what can be."""

    def __init__(self, sequence: sequences.Sequence, index: int, dialect: Dialect, served: Served) -> None:
        self.index = index
        self.is_done = False
        self._sequence = sequence
        self._dialect = dialect
        self._served = served
        self._decoder = DecodeStream(skip_special_tokens=sequence.request.stopping.skip_special_tokens)
        self._text = ""
        self._said = 0
        self._seen = 0
        self._told = 0

    def advance(self, identifier: str, count: int) -> list[dict[str, Any]]:
        """The chunks to send now that the completion has ``count`` tokens."""
        sequence, dialect = self._sequence, self._dialect
        # Read once: the engine's thread sets it after the last token.
        finish = sequence.finish if count == len(sequence.output_ids) else None
        if finish is None:
            for token in sequence.output_ids[self._seen : count]:
                self._text += self._decoder.step(self._served.loaded.tokenizer.backend_tokenizer, token) or ""
            self._seen = count
            text = self._speakable()
            calls: list[tool_calls.ToolCall] = []
        else:
            self.is_done = True
            text, calls = dialect.final(sequence)
        chunks: list[dict[str, Any]] = []
        if len(text) > self._said:
            delta, self._said = text[self._said :], len(text)
            logprobs, self._told = dialect.logprobs(sequence, self._told, count), count
            chunks.append(dialect.chunk(identifier, self.index, dialect.delta(delta), logprobs, None))
        if calls:
            chunks.append(dialect.chunk(identifier, self.index, dialect.call_delta(calls), None, None))
        if finish is not None:
            logprobs = dialect.logprobs(sequence, self._told, count) if self._told < count else None
            reason = "tool_calls" if calls else finish["type"]
            chunks.append(dialect.chunk(identifier, self.index, dialect.delta(None), logprobs, reason))
        return chunks

    def _speakable(self) -> str:
        """What can be said for certain: nothing that may turn out a stop string's or a tool call's beginning."""
        text = tool_calls.speakable(self._text) if self._dialect.has_tools else self._text
        held = max((tool_calls.overlap(text, stop) for stop in self._sequence.request.stopping.texts), default=0)
        return text[: len(text) - held]


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
