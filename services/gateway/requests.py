"""The body of /v1/chat/completions, and the keys by which a conversation is recognised."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from prometheus_client import Counter
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from services.chat.messages import TemplateOptions, for_template
from services.http.problems import ProblemError, invalid_body

MAX_CHOICES = 128
_EXACT = 2**53
"""Integers below this are exact in every JSON library."""
_FORCED = frozenset({"required", "any", "function", "tool", "custom", "allowed_tools"})
"""The values of ``tool_choice``, or their types, that force a call or bound the choice, in the three APIs."""
_CHANGING = """
audio bad_words chat_template container continue_final_message custom_logit_processor documents ebnf echo function_call
functions guided_choice guided_grammar guided_json guided_regex ignore_eos include_stop_str_in_output json_schema
logit_bias logits_processors min_tokens no_stop_trim prompt_logprobs regex stop_regex stop_token_ids structural_tag
structured_outputs truncate_prompt_tokens use_beam_search web_search_options
"""
_USUAL = {"add_generation_prompt": True, "best_of": 1, "modalities": ["text"], "skip_special_tokens": True}
REFUSED: Mapping[str, Any] = dict.fromkeys(_CHANGING.split()) | _USUAL
"""Fields of OpenAI, Anthropic, vLLM and SGLang that change an answer, with the value that does not; nor do empty ones,
unless it is true."""
_HINTS = """
cache_control context_management enable_thinking frequency_penalty include_reasoning inference_geo max_tool_calls
metadata min_p moderation prediction presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention
reasoning reasoning_effort repetition_penalty safety_identifier seed service_tier speed store stream_options temperature
thinking top_k top_p user verbosity
"""
IGNORED = frozenset(_HINTS.split())
"""Sampling parameters, which are the session's, and hints. They are ignored and counted, as unknown fields are."""
IGNORED_FIELDS = Counter("gateway_fields_ignored", "Fields of requests that are ignored; other: unknown.", ["field"])
NO_BEGINNING = "the beginning of an answer cannot be given here; end with a message of the user"
NO_BOUND = "a turn may have several calls; run them all, or set FORCED_TOOL_CALLS=auto, with which this is ignored"
NO_SCHEMA = (
    "an answer cannot be held to JSON or a schema here; ask for typed answers by a tool (in pydantic-ai ToolOutput, in "
    "LangChain method='function_calling') and set FORCED_TOOL_CALLS=auto, since libraries force that tool's call"
)
# Not orjson, which refuses integers beyond 64 bits; models write such arguments.
_CANONICAL = json.JSONEncoder(sort_keys=True)

M = TypeVar("M", bound=BaseModel)


def _refuse_forced(choice: Any) -> Any:
    if choice not in ("auto", "none"):
        raise ValueError(
            "a call of a tool cannot be forced here; allowed are 'auto' and 'none'. Send 'auto' and take an answer "
            "without a call, too, or set FORCED_TOOL_CALLS=auto, with which the gateway reads a forced call as 'auto'"
        )
    return choice


def _refuse_formats(value: Any) -> Any:
    if value and not (isinstance(value, dict) and value.get("type") == "text"):
        raise ValueError(NO_SCHEMA)
    return value


def _refuse_if_set(value: Any) -> Any:
    if value:
        raise ValueError("not supported by the gateway; leave it out")
    return value


def refuse_foreign_tools(tools: Any) -> Any:
    """Return tools that are functions, or raise ValueError."""
    kinds = [tool.get("type") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if foreign := [kind for kind in kinds if kind not in (None, "function")]:
        raise ValueError(f"tools of type {foreign[0]!r} are OpenAI's; offer functions, which the agent runs itself")
    return tools


def _stops(stop: Any) -> Any:
    """Return one stop string as a list, and none that is empty: SGLang would end every turn after its first token."""
    stops = [stop] if isinstance(stop, str) else stop
    return [text for text in stops if text != ""] if isinstance(stops, list) else stops


ToolChoice = Annotated[Literal["auto", "none"], BeforeValidator(_refuse_forced)]
TextFormat = Annotated[Any, BeforeValidator(_refuse_formats)]
Absent = Annotated[Any, BeforeValidator(_refuse_if_set)]
"""A field that asks for something that the gateway cannot give, unless it is empty."""


class HasFormat(BaseModel):
    """An object with the format of an answer, which must be text."""

    format: TextFormat = None


class StreamOptions(BaseModel):
    """The options of a stream."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """A request for the next turn of a conversation.

    Sampling parameters are the session's, so those of the request are ignored. Fields that would change the form or
    content of the answer and that engines cannot be relied on for are refused.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = ""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(
        default=None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    tools: Annotated[list[dict[str, Any]], BeforeValidator(refuse_foreign_tools)] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Literal[0] = 0
    response_format: TextFormat = None
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict)
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    _api: str = PrivateAttr()
    _asked: dict[str, Any] = PrivateAttr()

    @classmethod
    def of(
        cls, body: Mapping[str, Any], api: str = "", asked: Mapping[str, Any] | None = None, known: Iterable[str] = ()
    ) -> Self:
        """Return the request of a body.

        Args:
            body: a body of chat completions.
            api: the API in which the agent asked, where that is another one.
            asked: the body in that API.
            known: the fields of that API that ``body`` is made of.

        Raises:
            ProblemError: 400, the body is not valid, or asks for something that the gateway refuses.
        """
        sent = _without_nulls(body if asked is None else asked)
        known = {*known} or {*cls.model_fields, "max_completion_tokens"}
        unknown = {name: value for name, value in sent.items() if name not in known}
        for name, value in unknown.items():
            usual = cls.model_fields[name].default if name in cls.model_fields else REFUSED.get(name, value)
            if value != usual and name not in IGNORED and (value or usual is True):
                raise ProblemError(400, f"{name}: not supported, and it would change the answer; leave it out")
        request = validated(cls, body)
        wanted = {"messages": "tool_choice.disable_parallel_tool_use"}.get(api, "parallel_tool_calls")
        if request.messages[-1].get("role") == "assistant":
            raise ProblemError(400, f"{'input' if api == 'responses' else 'messages'}: {NO_BEGINNING}")
        if request.offered_tools and not request.parallel_tool_calls:
            raise ProblemError(400, f"{wanted}: {NO_BOUND}")
        for name in unknown:
            IGNORED_FIELDS.labels(name if name in IGNORED else "other").inc()
        request._api, request._asked = api, sent
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

    def fitted(self) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Return the messages as chat templates expect them, and the keys of the conversation.

        These are its keys before the first message, after the first, and so on. Two conversations have the same key if
        they have the same tools and their messages say the same: see ``next_key``.

        Raises:
            ProblemError: 400, a message is not readable.
        """
        messages = [for_template(message) for message in self.messages]
        keys = [_hash(b"", [self.offered_tools, self.chat_template_kwargs])]
        for message in messages:
            keys.append(next_key(keys[-1], message))
        return messages, keys


def next_key(key: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the key of a conversation that continues with ``message``, which for_template made.

    Only role, name, content without surrounding space, and the names and parsed arguments of calls count, because
    agents give calls other ids and write their JSON again. Thoughts do not: some agents send them back, some do not
    (``Tree.deepest`` compares those that are sent).
    """
    calls = [call["function"] for call in message.get("tool_calls") or []]
    parts = [message["role"], message.get("name"), message["content"].strip()]
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


def unforced(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a body of any API without what forces a call of a tool or bounds a turn to one call."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    is_forced = isinstance(kind, str) and (kind in _FORCED or (kind == "auto" and choice != kind))
    left_out = {"parallel_tool_calls", *(["tool_choice"] if is_forced else ())}
    return {name: value for name, value in body.items() if name not in left_out}


def validated(model: type[M], body: Mapping[str, Any]) -> M:
    """Return a body as ``model``; null stands for a field's default.

    Raises:
        ProblemError: 400, the body is not valid.
    """
    try:
        return model.model_validate(_without_nulls(body))
    except ValidationError as error:
        raise invalid_body(error) from error


def _without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _hash(key: bytes, content: Any) -> bytes:
    return hashlib.blake2b(key + b"\0" + _CANONICAL.encode(content).encode(), digest_size=16).digest()
