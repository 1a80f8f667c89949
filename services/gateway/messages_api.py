"""Anthropic's Messages API: its requests as chat completions, and its replies and streams.

https://docs.anthropic.com/en/api/messages; the types are those of the package ``anthropic``. A block of thought is
the ``reasoning_content`` of its message, which chat templates take or drop; encrypted ones are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Field, field_validator

from services.chat.messages import without_billing
from services.gateway.chat_api import AS_PARTS, Api, joined_text, named_event, offered_function
from services.gateway.requests import Absent, ChatRequest, HasFormat, TextFormat, ToolChoice, as_float, validated
from services.gateway.sessions import Session
from services.http.problems import ProblemError

_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[_Text], AS_PARTS] = Field(default_factory=list)


class _Thinking(BaseModel):
    type: Literal["thinking"]
    thinking: str


class _RedactedThinking(BaseModel):
    type: Literal["redacted_thinking"]


_AssistantBlock = Annotated[_Text | _ToolUse | _Thinking | _RedactedThinking, Field(discriminator="type")]
_UserBlock = Annotated[_Text | _ToolResult, Field(discriminator="type")]


class _AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: Annotated[list[_AssistantBlock], AS_PARTS]

    def as_chat(self) -> Iterator[dict[str, Any]]:
        text = "".join(block.text for block in self.content if isinstance(block, _Text))
        calls = [_call(block) for block in self.content if isinstance(block, _ToolUse)]
        thoughts = "".join(block.thinking for block in self.content if isinstance(block, _Thinking))
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        yield message | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thoughts} if thoughts else {})


class _UserMessage(BaseModel):
    role: Literal["user", "system"]
    content: Annotated[list[_UserBlock], AS_PARTS]

    def as_chat(self) -> Iterator[dict[str, Any]]:
        texts: list[str] = []
        for block in self.content:
            if isinstance(block, _Text):
                texts.append(block.text)
                continue
            if texts:
                yield {"role": self.role, "content": "".join(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": joined_text(block.content)}
        if texts or not self.content:
            yield {"role": self.role, "content": "".join(texts)}


class _Tool(BaseModel):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _is_the_agents_own(cls, kind: Any) -> Any:
        if kind not in (None, "custom"):
            raise ValueError(f"tools of type {kind!r} are Anthropic's; offer tools with name and input_schema")
        return kind


class _ToolChoice(BaseModel):
    type: ToolChoice = "auto"
    disable_parallel_tool_use: bool = False


class _Request(BaseModel):
    messages: list[Annotated[_AssistantMessage | _UserMessage, Field(discriminator="role")]] = Field(min_length=1)
    model: str = ""
    max_tokens: int | None = None
    system: Annotated[list[_Text], AS_PARTS] = Field(default_factory=list)
    stop_sequences: list[str] = Field(default_factory=list)
    tools: list[_Tool] = Field(default_factory=list)
    tool_choice: _ToolChoice = _ToolChoice()
    output_config: HasFormat = HasFormat()
    output_format: TextFormat = None
    mcp_servers: Absent = None
    compaction: Absent = None
    stream: bool = False


def _request(body: Mapping[str, Any], _session: Session) -> ChatRequest:
    if body.get("thread") is not None:
        # Anthropic's tool runner reads these details and sends whole conversations from then on.
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        headers = {"X-Should-Retry": "false"}
        detail = "thread: conversations are not held here; send the whole conversation in every request"
        raise ProblemError(400, detail, headers, error={"code": "thread", "details": details})
    request = validated(_Request, body)
    messages = [chat for message in request.messages for chat in message.as_chat()]
    if system := without_billing(joined_text(request.system)):
        messages.insert(0, {"role": "system", "content": system})
    chat = {
        "model": request.model,
        "messages": messages,
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "tools": [offered_function(tool.name, tool.description, tool.input_schema) for tool in request.tools],
        "tool_choice": request.tool_choice.type,
        "parallel_tool_calls": not request.tool_choice.disable_parallel_tool_use,
        "stream": request.stream,
    }
    return ChatRequest.of(chat, api="messages", asked=body, known=_Request.model_fields)


def _reply(completion: dict[str, Any], _request: ChatRequest) -> dict[str, Any]:
    [choice] = completion["choices"]
    message = choice["message"]
    text, calls = message["content"], message.get("tool_calls", ())
    thought = message.get("reasoning_content")
    blocks = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
    blocks += [{"type": "text", "text": text}] if text is not None else []
    for call in calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"], parse_int=_integer)
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    reason = _STOP_REASONS.get(choice["finish_reason"])
    matched = choice["matched_stop"] if reason is None else None
    return {
        "id": "msg_" + completion["id"].removeprefix("chatcmpl-"),
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": blocks,
        "stop_reason": reason or ("end_turn" if matched is None else "stop_sequence"),
        "stop_sequence": matched,
        "usage": {
            "input_tokens": completion["usage"]["prompt_tokens"],
            "output_tokens": completion["usage"]["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _stream(reply: Mapping[str, Any], _request: ChatRequest) -> Iterator[bytes]:
    started = {**reply, "content": [], "stop_reason": None, "stop_sequence": None}
    started["usage"] = {**reply["usage"], "output_tokens": 0}
    yield named_event({"type": "message_start", "message": started})
    for index, block in enumerate(reply["content"]):
        empty: dict[str, Any]
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        elif block["type"] == "thinking":
            empty, delta = {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        else:
            arguments = orjson.dumps(block["input"]).decode()
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        yield named_event({"type": "content_block_start", "index": index, "content_block": {**block, **empty}})
        yield named_event({"type": "content_block_delta", "index": index, "delta": delta})
        yield named_event({"type": "content_block_stop", "index": index})
    ended = {name: reply[name] for name in ("stop_reason", "stop_sequence")}
    yield named_event({"type": "message_delta", "delta": ended, "usage": reply["usage"]})
    yield named_event({"type": "message_stop"})


MESSAGES = Api("/messages", _request, _reply, _stream)


def _call(block: _ToolUse) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _integer(digits: str) -> int | float | None:
    """Return an integer of JSON, as a float where orjson cannot write it."""
    number = int(digits)
    return number if -(2**63) <= number < 2**64 else as_float(number)
