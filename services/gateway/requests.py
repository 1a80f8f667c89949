"""The body of /v1/chat/completions, and the keys by which a conversation is recognised."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from services.chat.messages import TemplateOptions, for_template
from services.http.problems import ProblemError, printable

MAX_CHOICES = 128
_EXACT = 2**53
"""Integers below this are exact in every JSON library."""
_FORCED = frozenset({"required", "any", "function", "tool", "custom", "allowed_tools"})
"""The values of ``tool_choice``, or their types, that force a call or bound the choice, in the three APIs."""
# Not orjson, which refuses integers beyond 64 bits; models write such arguments.
_CANONICAL = json.JSONEncoder(sort_keys=True)

M = TypeVar("M", bound=BaseModel)


class StreamOptions(BaseModel):
    """The options of a stream."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """A request for the next turn of a conversation.

    Sampling parameters are the session's, so those of the request are ignored. Fields that would change the form of the
    answer and that engines cannot be relied on for (a forced tool call, a JSON schema) are refused.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = ""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(
        default=None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    stop: list[str] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    top_logprobs: Literal[0] = 0
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict)
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    _api: str = PrivateAttr()
    _asked: dict[str, Any] = PrivateAttr()

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _empty_stops_stop_nothing(cls, stop: list[str]) -> list[str]:
        # SGLang would end every turn after its first token.
        return [text for text in stop if text]

    @field_validator("response_format")
    @classmethod
    def _answers_are_text(cls, response_format: dict[str, Any] | None) -> dict[str, Any] | None:
        if response_format is not None and response_format.get("type") != "text":
            raise ValueError("allowed is {'type': 'text'}")
        return response_format

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _calls_are_not_forced(cls, choice: Any) -> Any:
        return check_tool_choice(choice)

    @classmethod
    def of(cls, body: Mapping[str, Any], *, api: str = "", asked: Mapping[str, Any] | None = None) -> Self:
        """Return the request of a body.

        Args:
            body: a body of chat completions.
            api: the API in which the agent asked, where that is another one.
            asked: the body in that API.

        Raises:
            ProblemError: 400, the body is not valid, or asks for something that the gateway refuses.
        """
        request = validated(cls, body)
        request._api = api
        request._asked = _without_nulls(body if asked is None else asked)
        return request

    @property
    def asked(self) -> Mapping[str, Any]:
        """The body as the agent sent it, without its nulls."""
        return self._asked

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is offered."""
        return None if self.tool_choice == "none" else self.tools or None

    @functools.cached_property
    def digest(self) -> str:
        """A digest of API and body (32 hexadecimal digits), the same whether or not the reply is streamed."""
        body = {name: value for name, value in self._asked.items() if name not in ("stream", "stream_options")}
        return _hash(self._api.encode(), body).hex()

    def fitted(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them.

        Raises:
            ProblemError: 400, a message is not readable.
        """
        return [for_template(message) for message in self.messages]

    def keys(self, messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """Return the keys of the conversation before its first message, after the first, and so on.

        ``messages`` are those of ``fitted``. Two conversations have the same key if they have the same tools and their
        messages say the same: see ``next_key``.
        """
        keys = [_hash(b"", [self.offered_tools, self.chat_template_kwargs])]
        for message in messages:
            keys.append(next_key(keys[-1], message))
        return keys


def next_key(key: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the key of a conversation that continues with ``message``, which for_template made.

    Only role, name, content without surrounding space, thoughts, and the names and parsed arguments of calls count,
    because agents give calls other ids and write their JSON again.
    """
    calls = [call["function"] for call in message.get("tool_calls") or []]
    parts = [message["role"], message.get("name"), message["content"].strip()]
    if thoughts := message.get("reasoning_content"):
        parts.append(thoughts)
    return _hash(key, [*parts, [[call.get("name"), _comparable(call["arguments"])] for call in calls]])


def _comparable(value: Any) -> Any:
    """Return parsed JSON with equal numbers for equal values, because JavaScript writes 1.0 as 1."""
    if isinstance(value, dict):
        return {name: _comparable(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_comparable(member) for member in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, int) and abs(value) >= _EXACT:
        return as_float(value)
    return value


def as_float(value: int) -> float | None:
    """Return the float next to a large integer; None where that would be infinite, which JSON lacks."""
    try:
        return float(value)
    except OverflowError:
        return None


def check_tool_choice(choice: Any) -> Any:
    """Return a ``tool_choice`` that lets the model choose.

    Raises:
        ValueError: it forces a call.
    """
    if choice not in ("auto", "none"):
        raise ValueError(
            "a call of a tool cannot be forced here; allowed are 'auto' and 'none'. Send 'auto' and take an answer "
            "without a call, too, or set FORCED_TOOL_CALLS=auto, with which the gateway reads a forced call as 'auto'"
        )
    return choice


def unforced(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a body of any API without a ``tool_choice`` that forces a call."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    is_forced = isinstance(kind, str) and kind in _FORCED
    return {name: value for name, value in body.items() if name != "tool_choice"} if is_forced else body


def refuse_if_set(value: Any) -> Any:
    """Return an empty value.

    Raises:
        ValueError: it asks for something that the gateway cannot give.
    """
    if value:
        raise ValueError("not supported by the gateway; leave it out")
    return value


def validated(model: type[M], body: Mapping[str, Any]) -> M:
    """Return a body as ``model``; null stands for a field's default.

    Raises:
        ProblemError: 400, the body is not valid.
    """
    try:
        return model.model_validate(_without_nulls(body))
    except ValidationError as error:
        mistakes = [
            f"{'.'.join(str(part) for part in e['loc'])}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()[:3]
        ]
        raise ProblemError(400, "; ".join(map(printable, mistakes))) from error


def _without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _hash(key: bytes, content: Any) -> bytes:
    return hashlib.blake2b(key + b"\0" + _CANONICAL.encode(content).encode(), digest_size=16).digest()
