"""Messages of OpenAI's chat completions: made fit for chat templates, and their tool calls read from completions.

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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from services.http.json_body import json_depth
from services.http.problems import ProblemError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNWRITTEN = ("function_call", "audio", "refusal")
"""Members of OpenAI's messages that no chat template writes."""
_BILLING = re.compile(r"^x-anthropic-billing-header:(?:[^\S\n]*[\w.-]+=[^;\s]*(?:;|$))*[^\S\n]*\n?", re.MULTILINE)
"""The line of the system prompt in which Claude Code describes itself to Anthropic. It has another hash in every
request, so that no request would continue the conversation before it."""
OPENING = "<tool_call>"
MAX_DEPTH = 48
"""Levels of a call's arguments. Anthropic's clients send arguments as a part of the body, which has json_body.MAX_DEPTH
levels at most."""
_MARKER = re.compile(r"</?think>|<tool_call>")
_BEGINNING = re.compile(r"\s*+(?=\{)")
_PART = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*"?|[{}<\\]', re.DOTALL)
"""Strings and braces of JSON, and two characters that JSON has in strings only."""
_END = re.compile(r"\s*+(?:</tool_call>|\Z)")


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    if "chat_template" in options:
        raise ValueError("a template is a program, which could run for ever; leave chat_template out")
    return options


TemplateOptions = Annotated[dict[str, Any], AfterValidator(_check_options)]
"""A request's arguments of the model's chat template, without another template."""


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: text content, arguments of calls as objects, no developer role.

    Raises:
        ProblemError: 400, the message is not readable.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise ProblemError(400, "every message needs a role")
    for name in filter(message.get, _UNWRITTEN):
        raise ProblemError(400, f"no chat template writes {name} of a message; give tool_calls, or content")
    result = {
        **message,
        "role": "system" if role == "developer" else role,
        "content": content_text(message.get("content")),
    }
    if result["role"] == "system":
        result["content"] = without_billing(result["content"])
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise ProblemError(400, "the tool_calls of a message must be a list")
        result["tool_calls"] = [_call_for_template(call) for call in calls]
    return result


def without_billing(text: str) -> str:
    """Return the text of a system prompt without the line in which Claude Code describes itself."""
    return _BILLING.sub("", text)


def content_text(content: Any) -> str:
    """Return the text of a message's content.

    Raises:
        ProblemError: 400, the content is neither text nor a list of text parts.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise ProblemError(400, "the content of a message must be text or a list of text parts")
    return "".join(texts)


def _call_for_template(call: Any) -> dict[str, Any]:
    try:
        function = dict(call["function"])
        if isinstance(function["arguments"], str):
            function["arguments"] = parse_arguments(function["arguments"] or "{}")
    except (KeyError, TypeError, ValueError) as error:
        raise ProblemError(400, f"a tool call of a message is not readable: {error!r}") from error
    return {**call, "function": function}


def has_own_form(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer has a ``response_template``."""
    return getattr(tokenizer, "response_template", None) is not None


def read_calls(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    raw: str,
    prompt_ids: Sequence[int],
    tools: Sequence[dict[str, Any]],
) -> tuple[str, list[dict[str, Any]], int]:
    """Return a completion's text without its calls, the functions that it calls, and the number of unreadable calls.

    A function is its name and its arguments, the JSON text of an object.

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
        return parse_calls(text, is_thought=end.rstrip().endswith("<think>"))
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


def parse_calls(text: str, *, is_thought: bool = False) -> tuple[str, list[dict[str, Any]], int]:
    """Return the text without its calls in the form of Hermes, these calls, and the number of unreadable ones.

    With ``is_thought`` the prompt has begun a thought. The time is in proportion to the text: of the strings that are
    open at a marker, at most one began behind another marker.
    """
    calls: list[dict[str, Any]] = []
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


def _read(text: str, start: int) -> tuple[dict[str, Any] | None, int]:
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


def _call_of(content: Any) -> dict[str, Any] | None:
    """Return the function that ``name`` and ``arguments`` call; None if they are not a text and an object."""
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
    return {"name": content["name"], "arguments": text}


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
