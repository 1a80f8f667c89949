"""Replies in the two dialects of OpenAI's completions, whole and in chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from services.embedded_engine.compute.loading import Loaded
from services.embedded_engine.compute.sequences import Request, Sequence
from services.embedded_engine.http import tool_calls
from services.embedded_engine.http.sglang_wire import completion_text
from services.embedded_engine.http.tool_calls import ToolCall


def usage(requests: list[Request]) -> dict[str, Any]:
    """Token counts over all requests; each prompt counts once."""
    prompt = sum(len(request.prompt_ids) for request in requests)
    completion = sum(len(sequence.output_ids) for request in requests for sequence in request.sequences)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Dialect(ABC):
    """How one of the two routes words its replies."""

    object_name: str
    chunk_name: str

    def __init__(self, model: str, loaded: Loaded, top_logprobs: int | None, *, has_tools: bool = False) -> None:
        """Makes a dialect.

        Args:
            model: name of the model as the client called it.
            loaded: decodes tokens.
            top_logprobs: how many of the likeliest tokens are told at each place; None for no logprobs at all.
            has_tools: whether tool calls are read out of the text.
        """
        self.top_logprobs = top_logprobs
        self.has_tools = has_tools
        self._model = model
        self._loaded = loaded
        self._created = int(time.time())

    def reply(self, requests: list[Request], weight_version: str) -> dict[str, Any]:
        """The whole reply."""
        everything = [sequence for request in requests for sequence in request.sequences]
        return {
            "id": requests[0].rid,
            "object": self.object_name,
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(index, sequence) for index, sequence in enumerate(everything)],
            "usage": usage(requests),
            "metadata": {"weight_version": weight_version},
        }

    def chunk(
        self, identifier: str, index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None
    ) -> dict[str, Any]:
        """One chunk of a stream."""
        choice = {"index": index, **delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head(identifier), "choices": [choice]}

    def usage_chunk(self, identifier: str, counts: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the token counts."""
        return {**self._head(identifier), "choices": [], "usage": counts}

    def final(self, sequence: Sequence) -> tuple[str, list[ToolCall]]:
        """Text and tool calls of a completion that has ended."""
        text = completion_text(sequence, self._loaded.decode_text)
        return tool_calls.parse(text) if self.has_tools else (text, [])

    def opening(self) -> list[dict[str, Any]]:
        """What a choice's stream begins with."""
        return []

    @abstractmethod
    def delta(self, text: str | None) -> dict[str, Any]:
        """A chunk's piece of text; None in the last chunk."""

    def call_delta(self, calls: list[ToolCall]) -> dict[str, Any]:
        """A chunk's tool calls."""
        return {"delta": {"tool_calls": [{"index": i, **call.as_openai()} for i, call in enumerate(calls)]}}

    @abstractmethod
    def logprobs(self, sequence: Sequence, start: int, end: int) -> Any:
        """Log-probabilities of tokens ``start`` to ``end`` in the dialect's form; None where none are told."""

    @abstractmethod
    def _choice(self, index: int, sequence: Sequence) -> dict[str, Any]: ...

    def _head(self, identifier: str) -> dict[str, Any]:
        return {"id": identifier, "object": self.chunk_name, "created": self._created, "model": self._model}

    def _token(self, token: int) -> str:
        return self._loaded.decode_text([token], False)


class Chat(Dialect):
    """/v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        """The role comes first."""
        return [{"delta": {"role": "assistant", "content": ""}}]

    def delta(self, text: str | None) -> dict[str, Any]:
        """See Dialect."""
        return {"delta": {} if text is None else {"content": text}}

    def logprobs(self, sequence: Sequence, start: int, end: int) -> Any:
        """See Dialect."""
        if self.top_logprobs is None:
            return None
        places = []
        for place in range(start, end):
            entry = self._entry(sequence.output_ids[place], sequence.logprobs[place])
            top = sequence.top_logprobs[place] if self.top_logprobs else []
            places.append({**entry, "top_logprobs": [self._entry(token, logprob) for logprob, token in top]})
        return {"content": places}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _choice(self, index: int, sequence: Sequence) -> dict[str, Any]:
        text, calls = self.final(sequence)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = [call.as_openai() for call in calls]
        finish = sequence.finish or {}
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(sequence, 0, len(sequence.output_ids)),
            "finish_reason": "tool_calls" if calls else finish.get("type"),
        }


class Text(Dialect):
    """/v1/completions."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def delta(self, text: str | None) -> dict[str, Any]:
        """See Dialect."""
        return {"text": text or ""}

    def logprobs(self, sequence: Sequence, start: int, end: int) -> Any:
        """See Dialect."""
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

    def _choice(self, index: int, sequence: Sequence) -> dict[str, Any]:
        finish = sequence.finish or {}
        return {
            "index": index,
            "text": self.final(sequence)[0],
            "logprobs": self.logprobs(sequence, 0, len(sequence.output_ids)),
            "finish_reason": finish.get("type"),
        }
