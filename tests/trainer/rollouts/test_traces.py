"""Conversations are shown as people read them, and never take more than their space."""

from __future__ import annotations

from typing import Any

import pytest

from services.protocol.chat import CalledFunction, Message
from trainer.rollouts import episodes
from trainer.rollouts.episodes import shorten

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_tool_calls_and_results_have_the_tools_name() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "1+1?"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "sampled": True},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "another", "content": {"result": 2}},
    ]
    assert shorten(messages) == [
        Message(role="user", content="1+1?\n[image_url]"),
        Message(role="assistant", tool_calls=[CalledFunction(name="add", arguments='{"a": 1}')], sampled=True),
        Message(role="tool", content="2", name="add"),
        Message(role="tool", content='{"result":2}'),
    ]


def test_what_does_not_fit_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "MOST_CHARACTERS", 10)
    messages = [{"role": role, "content": "12345678"} for role in ("user", "assistant", "user", "assistant")]
    shown = shorten(messages)
    assert [message.content for message in shown] == ["12345678", "12… 6 more characters", "… 2 more messages"]
    assert [message.content for message in shorten(messages[:1])] == ["12345678"]


@pytest.mark.parametrize("message", [{}, {"role": 3, "tool_calls": [{}]}, {"content": ["a", 1]}, {"content": 7}])
def test_messages_of_any_form_are_shown(message: dict[str, Any]) -> None:
    assert len(shorten([message])) == 1
