"""An agent for each API of the gateway, with the clients that their vendors publish, for the tiny model."""

from __future__ import annotations

from typing import Any

import httpx
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from services.agents import Example


async def chat(example: Example, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> float | None:
    """Ask twice in one conversation by OpenAI's chat completions."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    asked = {"role": "user", "content": example.prompt}
    first = await client.chat.completions.create(model=example.model, messages=[asked])  # type: ignore[list-item]
    messages = [asked, {"role": "assistant", "content": first.choices[0].message.content or ""}, asked]
    second = await client.chat.completions.create(model=example.model, messages=messages)  # type: ignore[arg-type]
    return await example.score(second.choices[0].message.content or "")


async def responses(example: Example, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> float | None:
    """Ask twice in one conversation by OpenAI's Responses."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    first = await client.responses.create(model=example.model, input=example.prompt)
    second = await client.responses.create(model=example.model, input=example.prompt, previous_response_id=first.id)
    return await example.score(second.output_text)


async def messages(example: Example, *, base_url: str, api_key: str, http_client: object) -> float | None:
    """Ask twice in one conversation by Anthropic's Messages."""
    client = AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    asked = {"role": "user", "content": example.prompt}
    first = await client.messages.create(model=example.model, max_tokens=99, messages=[asked])  # type: ignore[list-item]
    conversation = [asked, {"role": "assistant", "content": first.content}, asked]
    second = await client.messages.create(model=example.model, max_tokens=99, messages=conversation)  # type: ignore[arg-type]
    return await example.score("".join(block.text for block in second.content if block.type == "text"))


async def each_api(example: Example, **endpoint: Any) -> float | None:
    """Ask by one of the three APIs, which the question's digits choose."""
    asked = (chat, responses, messages)[sum(map(int, filter(str.isdecimal, example.prompt))) % 3]
    return await asked(example, **endpoint)
