"""The conversation of an episode's sequence as people read it, of bounded size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from services.protocol.episodes import CalledTool, Message

MOST_CHARACTERS = 50_000
"""Longer conversations are cut. The tokens of such a conversation take eight times its space on the wire."""


def readable(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return chat messages as people read them; the text beyond MOST_CHARACTERS is left out, which the text says.

    A part of a message that is not text, such as an image, becomes its type in brackets.
    """
    shown: list[Message] = []
    left = MOST_CHARACTERS
    tools: dict[str, str] = {}
    """Names of tools by the id of their call."""

    def cut(text: str) -> str:
        nonlocal left
        kept, left = text[:left], max(left - len(text), 0)
        return kept if len(kept) == len(text) else f"{kept}… {len(text) - len(kept)} more characters"

    for message in messages:
        role = str(message.get("role"))
        name = tools.get(str(message.get("tool_call_id")), message.get("name"))
        if left == 0:
            return [*shown, Message(role=role, content=f"… {len(messages) - len(shown)} more messages")]
        calls = []
        content = cut(_text(message.get("content")))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            calls.append(CalledTool(name=str(function.get("name")), arguments=cut(_text(function.get("arguments")))))
            tools[str(call.get("id"))] = calls[-1].name
        sampled = message.get("sampled") is True
        shown.append(Message(role=role, content=content, tool_calls=calls, name=name and str(name), sampled=sampled))
    return shown


def _text(content: Any) -> str:
    """Return the text of a message's content, of its parts, or of a tool call's arguments."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in content)
    return orjson.dumps(content).decode()
