"""OpenAI's own client talks to the embedded engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from services.embedded_engine.app import create_app
from tests.services.embedded_engine.conftest import PROMPT, settings_for

Serving = Callable[..., Any]

QUESTION: list[Any] = [{"role": "user", "content": "3+4="}]
GREEDY = {"temperature": 0, "max_tokens": 3}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": QUESTION, "tools": [TOOL]}, "tools is not supported .* gateway"),
    ({"messages": QUESTION, "stream": True}, "stream is not supported .* gateway"),
    ({"messages": QUESTION, "tool_choice": "required"}, "tool_choice"),
    ({"messages": QUESTION, "frequency_penalty": 1.0}, "frequency_penalty"),
    ({"messages": QUESTION, "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [{"role": "user", "content": [PICTURE]}]}, "text parts"),
    ({"messages": [{"content": "3"}]}, "role"),
    ({"messages": []}, "messages"),
    ({"messages": QUESTION, "temperature": -1}, "temperature"),
    ({"messages": QUESTION, "extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1/0 }}"}}}, "chat_template"),
    ({"messages": QUESTION, "extra_body": {"chat_template_kwargs": {"add_generation_prompt": 1}}}, "conversation"),
    ({"messages": QUESTION, "logprobs": True, "top_logprobs": 2}, "top_logprobs is not supported"),
]


async def test_a_chat_is_answered_as_by_generate(serving: Serving, tiny_model: Path) -> None:
    async with serving(create_app(settings_for(tiny_model))) as http:
        asked: dict[str, Any] = {"input_ids": PROMPT, "return_logprob": True}
        asked["sampling_params"] = {"temperature": 0, "max_new_tokens": 3}
        wanted = (await http.post("/generate", json=asked)).json()
        client = openai.AsyncOpenAI(base_url="http://service/v1", api_key="none", http_client=http, max_retries=0)
        assert [model.id async for model in client.models.list()] == [str(tiny_model)]
        reply = await client.chat.completions.create(model="any", messages=QUESTION, logprobs=True, n=2, **GREEDY)
    meta = wanted["meta_info"]
    for choice in reply.choices:
        assert (choice.message.content, choice.finish_reason) == (wanted["text"], meta["finish_reason"]["type"])
        entries = choice.logprobs.content
        assert [entry.logprob for entry in entries] == [pair[0] for pair in meta["output_token_logprobs"]]
    count = len(wanted["output_ids"])
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(PROMPT), 2 * count)


async def test_what_cannot_be_honoured_is_refused(serving: Serving, tiny_model: Path) -> None:
    async with serving(create_app(settings_for(tiny_model))) as http:
        client = openai.AsyncOpenAI(base_url="http://service/v1", api_key="none", http_client=http, max_retries=0)
        for fields, reason in REFUSED:
            with pytest.raises(openai.BadRequestError, match=reason):
                await client.chat.completions.create(**{"model": "any", **fields})
