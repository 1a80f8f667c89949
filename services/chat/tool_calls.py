"""Tool calls in a completion, read as the counterpart of the chat template that writes them.

A tokenizer with a ``response_template`` (transformers' description of how a model answers) reads its model's calls by
it. Any other one is read in the form that Hermes and Qwen models are trained on:

    <tool_call>
    {"name": "add", "arguments": {"a": 3, "b": 4}}
    </tool_call>

What stands in a thought, ``<think>`` to ``</think>``, is a draft and no call. Anything else stays text, so that nothing
that the model wrote is lost.
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
_MARKER = re.compile(r"</?think>|<tool_call>")
_BEGINNING = re.compile(r"\s*+(?=\{)")
_PART = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*"?|[{}<\\]', re.DOTALL)
"""Strings and braces of JSON, and two characters that JSON has in strings only."""
_END = re.compile(r"\s*+(?:</tool_call>|\Z)")


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
        if OPENING not in text:
            return text, [], 0
        end = str(tokenizer.decode(list(prompt_ids[-16:])))  # Long enough for the beginning of a thought.
        return parse(text, is_thought=end.rstrip().endswith("<think>"))
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


def parse(text: str, *, is_thought: bool = False) -> tuple[str, list[ToolCall], int]:
    """Return the text without its calls in the form of Hermes, these calls, and the number of unreadable ones.

    With ``is_thought`` the prompt has begun a thought. The time is in proportion to the text: of the strings that are
    open at a marker, at most one began behind another marker.
    """
    calls: list[ToolCall] = []
    spans: list[int] = []
    place = unparsed = 0
    while marker := _MARKER.search(text, place):
        place = marker.end()
        if marker[0] != OPENING:
            is_thought = marker[0] == "<think>"
            if not is_thought:  # All before it was thought.
                calls, spans, unparsed = [], [], 0
        elif not is_thought:
            call, end = _read(text, place)
            if call is None:
                unparsed += 1
                continue
            calls.append(call)
            spans += [marker.start(), end]
            place = end
    bounds = [0, *spans, len(text)]
    rest = "".join(text[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True))
    return (rest.strip() if calls else text), calls, unparsed


def _read(text: str, start: int) -> tuple[ToolCall | None, int]:
    """Return the call behind an opening marker, and the end of its closing one; None if it is not readable."""
    opening = _BEGINNING.match(text, start)
    if opening is None:
        return None, start
    depth = 0
    for part in _PART.finditer(text, opening.end()):
        depth += {"{": 1, "}": -1}.get(part[0], 0)
        if depth == 0 or part[0] in ("<", "\\"):
            break
    end = _END.match(text, part.end())
    if depth or end is None:
        return None, start
    try:
        return _call_of(json.loads(text[opening.end() : part.end()])), end.end()
    except (RecursionError, ValueError):
        return None, start


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
