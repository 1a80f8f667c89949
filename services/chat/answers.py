"""Answers of a model, read from its completions: the thought, the text, and the functions that it calls.

Each family of models writes an answer in a form of its own. A tokenizer with a ``response_template`` (transformers'
description of such a form) is read by it; a chat template with a mark of FORMS by the one there, which covers harmony
(gpt-oss) and Gemma 4. Any other model is read in the two forms of Hermes and Qwen models:

    <tool_call>
    {"name": "add", "arguments": {"a": 3, "b": 4}}
    </tool_call>

    <tool_call>
    <function=add>
    <parameter=a>
    3
    </parameter>
    </function>
    </tool_call>

What stands in a thought, such as ``<think>`` to ``</think>``, is a draft and no call. A call that is cut off or cannot
be parsed stays text, so that nothing that the model wrote is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.chat.messages import parse_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]
"""The tools that a model is offered, as OpenAI's API has them."""

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_HARMONY = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {
            "open_pattern": r"<\|channel\|>analysis<\|message\|>",
            "close": "<|end|>",
            "repeats": True,
            "join": "\n",
        },
        "tool_calls": {
            "open_pattern": r"(?:<\|channel\|>\w+ )?to=functions\.(?P<name>[\w.-]+)(?:<\|channel\|>\w+)?"
            r"\s*(?:<\|constrain\|>)?\s*(?:json)?<\|message\|>",
            "close": "<|call|>",
            "content": "json",
            "repeats": True,
            "transform": _CALL,
        },
        "content": {
            "open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>",
            "close_pattern": r"<\|(?:end|return)\|>",
            "repeats": True,
            "join": "\n",
        },
    },
}
_GEMMA_4 = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],  # a tool's result stands in the turn that goes on
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>", "repeats": True, "join": "\n"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)(?=\{)",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            "repeats": True,
            "transform": _CALL,
        },
        "content": {"close_pattern": r"<turn\|>|<\|tool_response>", "repeats": True, "join": "\n"},
    },
}
FORMS: Mapping[str, Mapping[str, Any]] = {"<|channel|>analysis<|message|>": _HARMONY, "<|tool_call>call:": _GEMMA_4}
"""Response templates by a text that only the chat templates of such models have.

https://cookbook.openai.com/articles/openai-harmony, https://ai.google.dev/gemma/docs
"""
_THOUGHT_FIELDS = ("thinking", "reasoning_content", "reasoning")
"""The names of a thought in response templates."""

OPENING = "<tool_call>"
_BEGIN_THOUGHT, _END_THOUGHT = "<think>", "</think>"
_MARKER = re.compile(r"</?think>|<tool_call>")
_BEGINNING = re.compile(r"\s*+(?=\{)")
_PART = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*"?|[{}<\\]', re.DOTALL)
"""Strings and braces of JSON, and two characters that JSON has in strings only."""
_END = re.compile(r"\s*+(?:</tool_call>|\Z)")
_VALUE = r"(?>(?:(?!</parameter>|<tool_call>).)*)"
"""The text of a parameter. Without another call's opening in it, the time to read is in proportion to the text."""
_FUNCTION = re.compile(
    rf"\s*+<function=([^<>\s]++)>\s*+((?>(?:<parameter=[^<>\n]++>{_VALUE}</parameter>\s*+)*))</function>", re.DOTALL
)
_PARAMETER = re.compile(rf"<parameter=([^<>\n]++)>\n?({_VALUE})</parameter>", re.DOTALL)
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
"""Values of Python, as chat templates write them, in JSON."""


@dataclass(frozen=True)
class Answer:
    """A completion by its parts.

    Attributes:
        text: the completion without its thought, its calls, and special tokens.
        thought: the thought before the text; empty without one.
        calls: the functions that it calls: their names, and their arguments as the JSON text of an object.
        unparsed: the number of calls that cannot be read.
    """

    text: str
    thought: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    unparsed: int = 0


def form_of(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any] | None:
    """Return the response template of a model; None if it answers as Hermes and Qwen models do."""
    own: Mapping[str, Any] | None = getattr(tokenizer, "response_template", None)
    if own is not None:
        return own
    template = str(tokenizer.chat_template)
    return next((form for mark, form in FORMS.items() if mark in template), None)


def read_answer(form: Mapping[str, Any], raw: str, text: str, begun: str, tools: Tools) -> Answer:
    """Return what a completion says in a form of transformers.

    One call that cannot be parsed leaves the whole completion as text.

    Args:
        form: the response template.
        raw: the completion with its special tokens, which may bound a call.
        text: the completion without them.
        begun: the prompt's end, in which the chat template may have begun the turn.
        tools: their schemas give arguments a type.
    """
    from transformers.utils.chat_parsing import ResponseParser

    try:
        parser = ResponseParser(dict(form), prefix=begun, tools=list(tools))
        parser.feed(raw)
        message, last = parser.finalize()
    # According to where the completion leaves the form.
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return Answer(text, unparsed=1)
    ends_by_text = "close" in form["fields"].get("tool_calls", {})
    is_cut = ends_by_text and any(e["type"] == "region_close" and e["field"] == "tool_calls" for e in last)
    parsed = [_call_of(call.get("function", call)) for call in message.get("tool_calls") or []]
    calls = [call for call in parsed if call is not None]
    if is_cut or len(calls) < len(parsed):
        return Answer(text, unparsed=1)
    thought = next((message[name] for name in _THOUGHT_FIELDS if message.get(name)), "")
    content = message.get("content") or ""
    return Answer(content if calls or thought or content else text, thought, calls)


def read_plain_answer(text: str, tools: Tools | None, *, is_thought: bool = False) -> Answer:
    """Return what a completion says in the forms of Hermes and Qwen.

    Args:
        text: the completion without special tokens.
        tools: the tools that the model is offered; None: what looks like a call is text.
        is_thought: whether the prompt has begun a thought.
    """
    calls: list[dict[str, Any]] = []
    unparsed = 0
    rest = text
    if tools is not None and OPENING in text:
        rest, calls, unparsed = parse_calls(text, tools, is_thought=is_thought)
    thought, end, after = rest.rpartition(_END_THOUGHT)
    if not end and (is_thought or rest.lstrip().startswith(_BEGIN_THOUGHT)):
        thought, after = rest, ""
    thought = thought.strip().removeprefix(_BEGIN_THOUGHT).strip()
    return Answer(after.strip() if end else after, thought, calls, unparsed)


def parse_calls(text: str, tools: Tools = (), *, is_thought: bool = False) -> tuple[str, list[dict[str, Any]], int]:
    """Return the text without its calls in the forms of Hermes and Qwen, these, and the number of unreadable ones.

    With ``is_thought`` the prompt has begun a thought. The time is in proportion to the text: of the strings that are
    open at a marker, at most one began behind another marker.
    """
    calls: list[dict[str, Any]] = []
    spans: list[int] = []
    place = unparsed = 0
    while marker := _MARKER.search(text, place):
        place = marker.end()
        if marker[0] != OPENING:
            is_thought = marker[0] == _BEGIN_THOUGHT
            if not is_thought:  # All before it was thought.
                calls, spans, unparsed = [], [], 0
        elif not is_thought:
            function = _FUNCTION.match(text, place)
            call, end = _read(text, place) if function is None else _read_function(text, function, tools)
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
    """Return the call in JSON behind an opening marker, and the end of its closing one; None if it is not readable."""
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


def _read_function(text: str, function: re.Match[str], tools: Tools) -> tuple[dict[str, Any] | None, int]:
    """Return the call that an element ``function`` describes, and its end; None if it is not readable."""
    end = _END.match(text, function.end())
    schemas = next((_parameters(tool) for tool in tools if _name(tool) == function[1]), {})
    found = _PARAMETER.findall(function[2])
    arguments = {name: _typed(value.removesuffix("\n"), schemas.get(name)) for name, value in found}
    if end is None or len(arguments) < len(found):
        return None, function.start()
    return _call_of({"name": function[1], "arguments": arguments}), end.end()


def _name(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by name."""
    schema = tool["function"].get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _types(schema: Any) -> list[Any]:
    """Return the types of JSON that a schema allows; none if it does not say."""
    if not isinstance(schema, dict):
        return []
    declared = schema.get("type")
    choices = [choice for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list) for choice in schema[name]]
    own = declared if isinstance(declared, list) else [declared] if declared else []
    return [*own, *(kind for choice in choices for kind in _types(choice))]


def _typed(text: str, schema: Any) -> Any:
    """Return the value that a parameter's text stands for: text where the schema allows one, or does not say."""
    types = _types(schema)
    if not types or "string" in types:
        return text
    try:
        return json.loads(_PYTHONS.get(text.strip(), text))
    except (RecursionError, ValueError):
        return text


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
