"""Messages of OpenAI's chat completions, made fit for chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from services.http.json_body import json_depth
from services.http.problems import ProblemError

_UNWRITTEN = ("function_call", "audio", "refusal")
"""Members of OpenAI's messages that no chat template writes."""
_BILLING = re.compile(r"^x-anthropic-billing-header:(?:[^\S\n]*[\w.-]+=[^;\s]*(?:;|$))*[^\S\n]*\n?", re.MULTILINE)
"""The line of the system prompt in which Claude Code describes itself to Anthropic. It has another hash in every
request, so that no request would continue the conversation before it."""
MAX_DEPTH = 48
"""Levels of a call's arguments. Anthropic's clients send arguments as a part of the body, which has json_body.MAX_DEPTH
levels at most."""


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
