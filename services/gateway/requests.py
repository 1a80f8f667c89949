"""The body of /v1/chat/completions, and the keys by which a conversation is recognised."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from services.chat.messages import for_template
from services.http.problems import ProblemError, printable

MAX_CHOICES = 128


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
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    _body: dict[str, Any] = PrivateAttr()

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("response_format")
    @classmethod
    def _answers_are_text(cls, response_format: dict[str, Any] | None) -> dict[str, Any] | None:
        if response_format is not None and response_format.get("type") != "text":
            raise ValueError("allowed is {'type': 'text'}")
        return response_format

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Return the request of a body; null stands for a field's default.

        Raises:
            ProblemError: 400, the body is not valid, or asks for something that the gateway refuses.
        """
        given = {name: value for name, value in body.items() if value is not None}
        if given.get("tool_choice", "auto") not in ("auto", "none"):
            raise ProblemError(
                400, "tool_choice: a call of a tool cannot be forced here; allowed are 'auto' and 'none'"
            )
        try:
            request = cls.model_validate(given)
        except ValidationError as error:
            told = [f"{'.'.join(printable(str(part)) for part in e['loc'])}: {e['msg']}" for e in error.errors()[:3]]
            raise ProblemError(400, "; ".join(told)) from error
        request._body = given
        return request

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is offered."""
        return None if self.tool_choice == "none" else self.tools or None

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the body (32 hexadecimal digits), the same whether or not the reply is streamed."""
        body = {name: value for name, value in self._body.items() if name not in ("stream", "stream_options")}
        return _hash(b"", body).hex()

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
    """Return the key of a conversation that goes on with ``message``, which for_template made.

    Only role, name, content without surrounding space, and the names and parsed arguments of calls count, because
    agents give calls other ids and write their JSON anew.
    """
    calls = [call["function"] for call in message.get("tool_calls") or []]
    said = [message["role"], message.get("name"), message["content"].strip()]
    return _hash(key, [*said, [[call.get("name"), call["arguments"]] for call in calls]])


def _hash(key: bytes, content: Any) -> bytes:
    # Not by orjson, which refuses integers beyond 64 bits; models write such arguments.
    return hashlib.blake2b(key + b"\0" + json.dumps(content, sort_keys=True).encode(), digest_size=16).digest()
