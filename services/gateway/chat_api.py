"""An API of agents, and the first one, OpenAI's chat completions: its replies, whole or replayed as a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BeforeValidator

from services.chat.messages import for_template
from services.chat.prompts import ChatPrompts
from services.gateway.requests import ChatRequest, next_key
from services.gateway.sessions import Session
from services.gateway.tree import Call, Turn
from services.protocol.groups import TokenSequence
from services.protocol.rewards import FinishReason


@dataclass(frozen=True)
class Api:
    """An API of agents. A reply depends on chat completion and request alone, and a stream on the reply."""

    path: str
    """The route's path behind ``/v1``."""
    request: Callable[[Mapping[str, Any], Session], ChatRequest]
    """Returns the request of a body; raises ProblemError, 400."""
    reply: Callable[[dict[str, Any], ChatRequest], dict[str, Any]]
    """Returns a chat completion in the API's form."""
    stream: Callable[[Mapping[str, Any], ChatRequest], Iterator[bytes]]
    """Yields a reply as server-sent events."""


def named_event(content: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with the name that its content has as ``type``."""
    return f"event: {content['type']}\ndata: ".encode() + orjson.dumps(content) + b"\n\n"


AS_PARTS = BeforeValidator(
    lambda content: [{"type": "text", "text": content}] if isinstance(content, str) else content or []
)
"""Makes a list of parts of content that is text."""


def joined_text(parts: Iterable[Any]) -> str:
    """Return the text of all parts of a content."""
    return "".join(part.text for part in parts)


def offered_function(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chat completions offer it."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def add_turns(
    call: Call, completions: Sequence[TokenSequence], request: ChatRequest, key: bytes, prompts: ChatPrompts
) -> None:
    """Add a turn for each completion, as the agent gets it, to ``call``; ``key`` is that of the conversation."""
    for completion in completions:
        answer = prompts.answer_of(completion, request.stop, call.added_ids, request.offered_tools)
        text = answer.text if answer.text or not answer.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if answer.thought:
            message["reasoning_content"] = answer.thought
        if answer.calls:
            # The ids follow from the request, so that a call that is sampled again after a crash has the same.
            prefix = f"call_{call.name[:20]}{call.name[32:]}_{len(call.turns)}_"
            message["tool_calls"] = [
                {"id": f"{prefix}{number}", "type": "function", "function": function}
                for number, function in enumerate(answer.calls)
            ]
        call.turns.append(Turn(call, completion, message, next_key(key, for_template(message)), answer.unparsed))


def reply_of(call: Call, request: ChatRequest, model: str, prompt_tokens: int, prompts: ChatPrompts) -> dict[str, Any]:
    """Return the chat completion of a call's turns."""
    choices = [
        {
            "index": index,
            "message": turn.message,
            "logprobs": _logprobs(turn.completion, prompts) if request.logprobs else None,
            "finish_reason": _finish_reason(turn),
            "matched_stop": _matched_stop(turn.completion, request, prompts),
        }
        for index, turn in enumerate(call.turns)
    ]
    sampled = call.sampled_tokens
    thoughts = sum(len(prompts.codec.encode(turn.message.get("reasoning_content", ""))) for turn in call.turns)
    return {
        "id": f"chatcmpl-{call.name}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model or model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "completion_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": prompt_tokens + sampled,
        },
    }


def _stream(reply: Mapping[str, Any], request: ChatRequest) -> Iterator[bytes]:
    """Yield a whole reply as server-sent events: role, text, tool calls and end of each choice."""
    head = {"id": reply["id"], "object": "chat.completion.chunk", "created": reply["created"], "model": reply["model"]}

    def event(choices: list[dict[str, Any]], **fields: Any) -> bytes:
        return b"data: " + orjson.dumps({**head, "choices": choices, **fields}) + b"\n\n"

    for choice in reply["choices"]:
        message = choice["message"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if thought := message.get("reasoning_content"):
            deltas.append({"reasoning_content": thought})
        if message["content"]:
            deltas.append({"content": message["content"]})
        if calls := message.get("tool_calls"):
            deltas.append({"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]})
        for delta in deltas:
            yield event([{"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": None}])
        yield event([{name: value for name, value in choice.items() if name != "message"} | {"delta": {}}])
    if request.stream_options.include_usage:
        yield event([], usage=reply["usage"])
    yield b"data: [DONE]\n\n"


CHAT = Api(
    path="/chat/completions",
    request=lambda body, _session: ChatRequest.of(body),
    reply=lambda completion, _request: completion,
    stream=_stream,
)


def _finish_reason(turn: Turn) -> str:
    """Return why a turn ended: not with its calls, if it was cut off behind them."""
    reason = turn.completion.finish_reason
    return "tool_calls" if turn.message.get("tool_calls") and reason is not FinishReason.LENGTH else reason.value


def _matched_stop(completion: TokenSequence, request: ChatRequest, prompts: ChatPrompts) -> str | None:
    """Return the stop string that ended a completion; None if it ended otherwise."""
    if not request.stop:
        return None
    text = prompts.text(completion, ())
    return min((end for end in request.stop if end in text), key=text.find, default=None)


def _logprobs(completion: TokenSequence, prompts: ChatPrompts) -> dict[str, Any]:
    pairs = zip(completion.completion_ids.tolist(), completion.logprobs.tolist(), strict=True)
    entries = [
        {"token": prompts.codec.decode([token]), "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in pairs
    ]
    return {"content": entries}
