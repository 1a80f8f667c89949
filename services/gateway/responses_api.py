"""OpenAI's Responses API: its requests as chat completions, and its replies and streams.

https://platform.openai.com/docs/api-reference/responses; the types are those of the package ``openai``. A session keeps
every response, whatever ``store`` says. Items of thought become the ``reasoning_content`` of the message after them,
which chat templates take or drop; encrypted ones are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from services.gateway.chat_api import AS_PARTS, Api, joined_text, named_event, offered_function
from services.gateway.requests import Absent, ChatRequest, HasFormat, ToolChoice, refuse_foreign_tools, validated
from services.gateway.sessions import Session
from services.http.problems import refuse

_LOGPROBS = "message.output_text.logprobs"


class _Text(BaseModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _Message(BaseModel):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[list[_Text], AS_PARTS]


class _FunctionCall(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _FunctionCallOutput(BaseModel):
    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[list[_Text], AS_PARTS]


class _Thought(BaseModel):
    text: str


class _Reasoning(BaseModel):
    type: Literal["reasoning"]
    summary: list[_Thought] = Field(default_factory=list)
    content: list[_Thought] | None = None


class _ItemReference(BaseModel):
    type: Literal["item_reference"]
    id: str


_Item = Annotated[
    _Message | _FunctionCall | _FunctionCallOutput | _Reasoning | _ItemReference, Field(discriminator="type")
]


class _Tool(BaseModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Request(BaseModel):
    input: list[_Item] = Field(default_factory=list)
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[list[_Tool], BeforeValidator(refuse_foreign_tools)] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: HasFormat = HasFormat()
    include: list[str] = Field(default_factory=list)
    top_logprobs: Literal[0] = 0
    truncation: Literal["disabled"] = "disabled"
    background: Absent = None
    conversation: Absent = None
    prompt: Absent = None
    stream: bool = False

    @field_validator("input", mode="before")
    @classmethod
    def _as_items(cls, value: Any) -> Any:
        """Return input that is text as a list of items, and items without a type as messages."""
        if isinstance(value, str):
            return [{"type": "message", "role": "user", "content": value}]
        if isinstance(value, list):
            return [{"type": "message", **item} if isinstance(item, dict) else item for item in value]
        return value


def _request(body: Mapping[str, Any], session: Session) -> ChatRequest:
    request = validated(_Request, body)
    messages = [] if request.previous_response_id is None else _before(session, request.previous_response_id)
    messages += _messages(session, request.input)
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
    chat = {
        "model": request.model,
        "messages": messages,
        "max_tokens": request.max_output_tokens,
        "tools": [offered_function(tool.name, tool.description, tool.parameters or {}) for tool in request.tools],
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "logprobs": _LOGPROBS in request.include,
        "stream": request.stream,
    }
    return ChatRequest.of(chat, api="responses", asked=body, known=_Request.model_fields)


def find(session: Session, response_id: str) -> dict[str, Any] | None:
    """Return the response of an id that the session has given; None for any other id."""
    call = session.tree.calls.get(response_id.removeprefix("resp_"))
    return call.reply if call is not None and call.reply.get("id") == response_id else None


def _before(session: Session, response_id: str) -> list[dict[str, Any]]:
    """Return the conversation up to and with a response, without its instructions, which hold for one response."""
    response = find(session, response_id)
    if response is None:
        detail = f"session {session.id} has no response {response_id}; send the conversation itself as input"
        refuse(400, detail, "previous_response_not_found")
    [turn] = session.tree.calls[response_id.removeprefix("resp_")].turns
    return turn.conversation[response["instructions"] is not None :]


def _messages(session: Session, items: list[Any]) -> list[dict[str, Any]]:
    """Return input items as messages: a text and the calls after it are one message, as the model wrote it."""
    messages: list[dict[str, Any]] = []
    thoughts: dict[str, Any] = {}
    for listed in items:
        item = _referred(session, listed) if isinstance(listed, _ItemReference) else listed
        if isinstance(item, _Reasoning):
            text = joined_text(item.content or item.summary)
            thoughts = {"reasoning_content": text} if text else {}
        elif isinstance(item, _FunctionCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": joined_text(item.output)})
        elif isinstance(item, _Message):
            message = {"role": item.role, "content": joined_text(item.content)}
            messages.append(message | (thoughts if item.role == "assistant" else {}))
            thoughts = {}
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None} | thoughts)
                thoughts = {}
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _referred(session: Session, reference: _ItemReference) -> _Message | _FunctionCall | _Reasoning:
    """Return the item of an earlier response that an item refers to."""
    earlier = [item for call in session.tree.calls.values() for item in call.reply.get("output", ())]
    item = next((item for item in earlier if item["id"] == reference.id), None)
    if item is None:
        refuse(400, f"session {session.id} has no item {reference.id}; send the item itself", "item_not_found")
    if item["type"] == "reasoning":
        return _Reasoning.model_validate(item)
    return _Message.model_validate(item) if item["type"] == "message" else _FunctionCall.model_validate(item)


def _reply(completion: dict[str, Any], request: ChatRequest) -> dict[str, Any]:
    [choice] = completion["choices"]
    digest = completion["id"].removeprefix("chatcmpl-")
    is_cut = choice["finish_reason"] == "length"
    status = "incomplete" if is_cut else "completed"
    said = choice["message"]
    text, calls = said["content"], said.get("tool_calls", ())
    output: list[dict[str, Any]] = []
    if thought := said.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        output.append({"id": f"rs_{digest}", "type": "reasoning", "summary": [], "content": content})
    if text is not None:
        entries = choice["logprobs"]["content"] if choice["logprobs"] else []
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}
        message = {"id": f"msg_{digest}", "type": "message", "role": "assistant", "status": status, "content": [part]}
        output.append(message)
    for call in calls:
        item = {"id": "fc_" + call["id"].removeprefix("call_"), "type": "function_call", "call_id": call["id"]}
        output.append({**item, **call["function"], "status": "completed"})
    asked, usage = request.asked, completion["usage"]
    return {
        "id": f"resp_{digest}",
        "object": "response",
        "created_at": completion["created"],
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": asked.get("instructions"),
        "max_output_tokens": asked.get("max_output_tokens"),
        "metadata": asked.get("metadata", {}),
        "model": completion["model"],
        "output": output,
        "parallel_tool_calls": asked.get("parallel_tool_calls", True),
        "previous_response_id": asked.get("previous_response_id"),
        "store": asked.get("store", True),
        "text": {"format": {"type": "text"}},
        "tool_choice": request.tool_choice,
        "tools": asked.get("tools", []),
        "truncation": "disabled",
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        },
    }


def _stream(reply: Mapping[str, Any], _request: ChatRequest) -> Iterator[bytes]:
    started = {**reply, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
    ]
    for index, item in enumerate(reply["output"]):
        where = {"item_id": item["id"], "output_index": index}
        begun, content = _EVENTS[item["type"]](item, where)
        added = {**item, **begun, "status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": index, "item": added})
        events += content
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{reply['status']}", "response": reply})
    for number, event in enumerate(events):
        yield named_event({**event, "sequence_number": number})


def _text_events(item: dict[str, Any], where: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what differs in a message that has just begun, and the events of its text."""
    [part] = item["content"]
    where = {**where, "content_index": 0}
    text, entries = part["text"], part["logprobs"]
    return {"content": []}, [
        {"type": "response.content_part.added", **where, "part": {**part, "text": "", "logprobs": []}},
        {"type": "response.output_text.delta", **where, "delta": text, "logprobs": entries},
        {"type": "response.output_text.done", **where, "text": text, "logprobs": entries},
        {"type": "response.content_part.done", **where, "part": part},
    ]


def _call_events(item: dict[str, Any], where: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what differs in a call that has just begun, and the events of its arguments."""
    arguments = item["arguments"]
    done = {"name": item["name"], "arguments": arguments}
    return {"arguments": ""}, [
        {"type": "response.function_call_arguments.delta", **where, "delta": arguments},
        {"type": "response.function_call_arguments.done", **where, **done},
    ]


def _thought_events(item: dict[str, Any], where: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what differs in a thought that has just begun, and the events of its text."""
    [part] = item["content"]
    where = {**where, "content_index": 0}
    return {"content": []}, [
        {"type": "response.reasoning_text.delta", **where, "delta": part["text"]},
        {"type": "response.reasoning_text.done", **where, "text": part["text"]},
    ]


_EVENTS = {"message": _text_events, "function_call": _call_events, "reasoning": _thought_events}

RESPONSES = Api("/responses", _request, _reply, _stream)
