"""An agent of the tiny model that offers it a tool."""

from __future__ import annotations

from typing import Any

import httpx
from openai import AsyncOpenAI

from services.agents import Example

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def with_tool(example: Example, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> float | None:
    """Offer a tool, and score the answer, whether it was called or not."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    messages: Any = [{"role": "user", "content": example.prompt}]
    reply = await client.chat.completions.create(model=example.model, messages=messages, tools=[TOOL])
    return await example.score(reply.choices[0].message.content or "")
