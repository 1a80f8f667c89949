"""Tool calls in a completion, read as the counterpart of the chat template that writes them.

A tokenizer with a ``response_template`` (transformers' description of how a model answers) reads its model's calls by
it. Any other one is read in the form that Hermes and Qwen models are trained on:

    <tool_call>
    {"name": "add", "arguments": {"a": 3, "b": 4}}
    </tool_call>

Anything else stays text, so that nothing that the model wrote is lost.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.http.json_body import json_depth

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENING = "<tool_call>"
MAX_DEPTH = 48
"""Levels of a call's arguments. Anthropic's clients send arguments as a part of the body, which has json_body.MAX_DEPTH
levels at most."""
_CALL = re.compile(r"<tool_call>(?P<body>.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; its arguments are the JSON text of an object."""

    id: str
    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        """Return the call in the form of chat completions."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def has_own_form(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer has a ``response_template``."""
    return getattr(tokenizer, "response_template", None) is not None


def read(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    raw: str,
    prompt_ids: Sequence[int],
    tools: Sequence[dict[str, Any]],
) -> tuple[str, list[ToolCall], int]:
    """Return a completion's text without its calls, these calls, and the number of calls that cannot be parsed.

    By a ``response_template``, one call that cannot be parsed leaves the whole completion as text.

    Args:
        tokenizer: the model's.
        text: the completion without special tokens.
        raw: the completion with its special tokens, which may bound a call.
        prompt_ids: the prompt's tokens; a template may have begun the turn in them.
        tools: the tools that the model was offered, as OpenAI's API has them; their schemas give arguments a type.
    """
    if not has_own_form(tokenizer):
        rest, calls = parse(text)
        return rest, calls, rest.count(OPENING)
    try:
        message = tokenizer.parse_response(raw, prefix=list(prompt_ids), tools=list(tools))
    # According to where the completion leaves the form.
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return text, [], 1
    parsed = [_call_of(call.get("function", call)) for call in message.get("tool_calls") or []]
    calls = [call for call in parsed if call is not None]
    if len(calls) < len(parsed):
        return text, [], 1
    return (message.get("content") or "", calls, 0) if calls else (text, [], 0)


def parse(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text without its well-formed calls in the form of Hermes, and these calls, in order."""
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _read(match["body"])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    rest = _CALL.sub(take, text)
    return (rest.strip() if calls else text), calls


def text_before_calls(text: str) -> str:
    """Return the beginning of an unfinished text that is certainly not part of a call."""
    start = text.find(OPENING)
    if start >= 0:
        return text[:start]
    return text[: len(text) - overlap(text, OPENING)]


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest proper prefix of ``marker`` with which ``text`` ends."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def _read(body: str) -> ToolCall | None:
    try:
        return _call_of(json.loads(body))
    except (RecursionError, ValueError):
        return None


def _call_of(content: Any) -> ToolCall | None:
    """Return the call that ``name`` and ``arguments`` describe; None if they are not a text and an object."""
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return None
    arguments = content.get("arguments", content.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    try:
        # Python reads NaN, Infinity and 1e999; JSON has none of them.
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        parse_arguments(text)
        content["name"].encode()
    except (RecursionError, ValueError):
        return None
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", content["name"], text)


def parse_arguments(text: str) -> Any:
    """Return the arguments that a JSON text describes.

    Raises:
        ValueError: the text is not JSON, is nested more than MAX_DEPTH levels deep, or has half a character, such as
            the escape \\ud800, which cannot be written as UTF-8.
    """
    if (depth := json_depth(text.encode())) > MAX_DEPTH:
        raise ValueError(f"{depth} levels of nesting; allowed are {MAX_DEPTH}")
    arguments = json.loads(text)
    json.dumps(arguments, ensure_ascii=False).encode()
    return arguments
