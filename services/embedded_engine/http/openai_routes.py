"""OpenAI's chat and text completions in front of the embedded engine, for OpenAI clients and agent libraries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse
from tokenizers.decoders import DecodeStream

from services.chat import tool_calls
from services.chat.tool_calls import ToolCall
from services.core.logs import get_logger
from services.embedded_engine.compute.loading import Loaded
from services.embedded_engine.compute.sequences import Request, Sequence
from services.embedded_engine.http.requests import ChatRequest, CompletionRequest, OpenAIRequest, make_request
from services.embedded_engine.http.sglang_routes import completion_text
from services.embedded_engine.http.state import EngineState, state_of
from services.http.json_body import JsonResponse

log = get_logger(__name__)


Progress = asyncio.Queue[tuple[Sequence, int]]
"""A sequence and its number of tokens, each time that there is a new token."""


def add_routes(app: FastAPI) -> None:
    """Add OpenAI's routes."""

    @app.get("/v1/models", tags=["openai"])
    async def models(http: HttpRequest) -> Response:
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
    async def chat_completions(body: ChatRequest, http: HttpRequest) -> Response:
        """Answer a conversation; with ``tools``, the model's calls come as tool calls."""
        state = state_of(http)
        top_logprobs = body.top_logprobs if body.logprobs else None
        model = body.model or state.settings.model_name
        replies = ChatReplies(model, state.loaded, top_logprobs, body.offered_tools)
        prompt_ids = body.prompt_ids(state.loaded.tokenizer)
        _warn_of_dropped(state, body)
        return await _answer(state, http, body, replies, [prompt_ids])

    @app.post("/v1/completions", tags=["openai"])
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        """Continue a text, or several."""
        state = state_of(http)
        replies = TextReplies(body.model or state.settings.model_name, state.loaded, body.logprobs)
        return await _answer(state, http, body, replies, body.prompts(state.loaded.tokenizer))


def _warn_of_dropped(state: EngineState, body: ChatRequest) -> None:
    """Log once which parts the model's chat template drops. Such requests are answered, as SGLang answers them."""
    for name in body.dropped_by(state.loaded.tokenizer):
        if name not in state.warned_of:
            state.warned_of.add(name)
            log.warning(
                f"the model never sees the {name} of requests: its chat template drops them",
                model=state.settings.model_name,
                remedy=f"give its directory a chat_template.jinja that renders {name}",
            )


async def _answer(
    state: EngineState, http: HttpRequest, body: OpenAIRequest, replies: TextReplies, prompts: list[list[int]]
) -> Response:
    progress: Progress = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def on_progress(sequence: Sequence) -> None:
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
    requests: list[Request],
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


class TextReplies:
    """The replies of /v1/completions to one body."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self, model: str, loaded: Loaded, top_logprobs: int | None, tools: list[dict[str, Any]] | None = None
    ) -> None:
        """Describe the replies.

        Args:
            model: the model's name as the client gave it.
            loaded: decodes tokens.
            top_logprobs: the number of likeliest tokens given for each token; None for no log-probabilities at all.
            tools: those offered to the model; with any, its calls are read out of the text.
        """
        self.top_logprobs = top_logprobs
        self.tools = tools
        self.loaded = loaded
        self._model = model
        self._created = int(time.time())

    def whole(self, requests: list[Request], weight_version: str) -> dict[str, Any]:
        """Return the whole reply to all requests, which have ended."""
        sequences = [sequence for request in requests for sequence in request.sequences]
        choices = []
        for index, sequence in enumerate(sequences):
            text, calls = self.text_and_calls(sequence)
            logprobs = self.logprobs(sequence, 0, len(sequence.output_ids))
            choices.append(_choice(index, self.content(text, calls), logprobs, _finish_reason(sequence, calls)))
        metadata = {"weight_version": weight_version}
        return self._reply(self.object_name, requests, choices, usage=usage(requests), metadata=metadata)

    def chunk(self, requests: list[Request], choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Return one chunk of a stream."""
        return self._reply(self.chunk_name, requests, choices, **fields)

    def text_and_calls(self, sequence: Sequence) -> tuple[str, list[ToolCall]]:
        """Return text and tool calls of a completion that has ended."""
        text = completion_text(sequence, self.loaded)
        if not self.tools:
            return text, []
        raw = completion_text(sequence, self.loaded, whole=True)
        text, calls, _ = tool_calls.read(self.loaded.tokenizer, text, raw, sequence.request.prompt_ids, self.tools)
        return text, calls

    def opening(self) -> dict[str, Any] | None:
        """Return the content of a stream's first choice, before any text; None if there is none."""
        return None

    def content(self, text: str, calls: list[ToolCall]) -> dict[str, Any]:
        """Return the content of a whole choice."""
        return {"text": text}

    def delta(self, text: str, calls: list[ToolCall]) -> dict[str, Any]:
        """Return the content of a stream's choice; both arguments are empty in the last one."""
        return {"text": text}

    def logprobs(self, sequence: Sequence, start: int, end: int) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens ``start`` to ``end``, or None if the client does not want any."""
        if self.top_logprobs is None:
            return None
        tokens = [self._token(token) for token in sequence.output_ids[:end]]
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        tops = sequence.top_logprobs[start:end] if self.top_logprobs else []
        return {
            "tokens": tokens[start:],
            "token_logprobs": sequence.logprobs[start:end],
            "top_logprobs": [{self._token(token): logprob for logprob, token in top} for top in tops],
            "text_offset": offsets[start:end],
        }

    def _reply(
        self, kind: str, requests: list[Request], choices: list[dict[str, Any]], **fields: Any
    ) -> dict[str, Any]:
        head = {"id": requests[0].rid, "object": kind, "created": self._created, "model": self._model}
        return {**head, "choices": choices, **fields}

    def _token(self, token: int) -> str:
        return self.loaded.decode_text([token], False)


class ChatReplies(TextReplies):
    """The replies of /v1/chat/completions, which differ from those of /v1/completions in what a choice has."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self) -> dict[str, Any] | None:
        """Return the role."""
        return {"delta": {"role": "assistant", "content": ""}}

    def content(self, text: str, calls: list[ToolCall]) -> dict[str, Any]:
        """Return the message."""
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = [call.as_openai() for call in calls]
        return {"message": message}

    def delta(self, text: str, calls: list[ToolCall]) -> dict[str, Any]:
        """Return a piece of the message."""
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": index, **call.as_openai()} for index, call in enumerate(calls)]
        return {"delta": delta}

    def logprobs(self, sequence: Sequence, start: int, end: int) -> dict[str, Any] | None:
        """Return an entry per token, each with the likeliest tokens at its position."""
        if self.top_logprobs is None:
            return None
        entries = []
        for place in range(start, end):
            top = sequence.top_logprobs[place] if self.top_logprobs else []
            entry = self._entry(sequence.output_ids[place], sequence.logprobs[place])
            entries.append({**entry, "top_logprobs": [self._entry(token, logprob) for logprob, token in top]})
        return {"content": entries}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token(token), "logprob": logprob, "bytes": list(self.loaded.codec.token_bytes(token))}


class ChoiceStream:
    """One completion of a stream, which knows how much of it has been sent."""

    def __init__(self, index: int, sequence: Sequence, replies: TextReplies) -> None:
        self.is_done = False
        self._index = index
        self._sequence = sequence
        self._replies = replies
        self._decoder = DecodeStream(skip_special_tokens=sequence.request.stopping.skip_special_tokens)
        self._text = ""
        self._num_decoded = 0
        self._sent_text = 0
        self._sent_logprobs = 0

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the choice to send before any text, if there is one."""
        content = self._replies.opening()
        if content is not None:
            yield _choice(self._index, content, None, None)

    def advance(self, count: int) -> Iterator[dict[str, Any]]:
        """Yield the choices to send now that the completion has ``count`` tokens."""
        sequence, replies = self._sequence, self._replies
        # Read once, because the engine's thread sets it after the last token.
        finish = sequence.finish if count == len(sequence.output_ids) else None
        calls: list[ToolCall] = []
        if finish is None:
            for token in sequence.output_ids[self._num_decoded : count]:
                self._text += self._decoder.step(replies.loaded.tokenizer.backend_tokenizer, token) or ""
            self._num_decoded = count
            text = self._certain_text()
        else:
            self.is_done = True
            text, calls = replies.text_and_calls(sequence)
        if len(text) > self._sent_text:
            piece, self._sent_text = text[self._sent_text :], len(text)
            yield _choice(self._index, replies.delta(piece, []), self._next_logprobs(count), None)
        if calls:
            yield _choice(self._index, replies.delta("", calls), None, None)
        if finish is not None:
            reason = _finish_reason(sequence, calls)
            yield _choice(self._index, replies.delta("", []), self._next_logprobs(count), reason)

    def _next_logprobs(self, count: int) -> Any:
        start, self._sent_logprobs = self._sent_logprobs, count
        return self._replies.logprobs(self._sequence, start, count) if start < count else None

    def _certain_text(self) -> str:
        """Return the text without an end that could be the start of a stop string or a tool call."""
        text = self._text
        if self._replies.tools:
            # By a response template only the whole completion tells calls from text.
            has_own_form = tool_calls.has_own_form(self._replies.loaded.tokenizer)
            text = "" if has_own_form else tool_calls.text_before_calls(text)
        stops = self._sequence.request.stopping.texts
        return text[: len(text) - max((tool_calls.overlap(text, stop) for stop in stops), default=0)]


def usage(requests: list[Request]) -> dict[str, Any]:
    """Return token counts over all requests; each prompt counts once."""
    prompt = sum(len(request.prompt_ids) for request in requests)
    completion = sum(len(sequence.output_ids) for request in requests for sequence in request.sequences)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _choice(index: int, content: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _finish_reason(sequence: Sequence, calls: list[ToolCall]) -> str | None:
    reason = (sequence.finish or {}).get("type")
    return "tool_calls" if calls and reason == "stop" else reason
