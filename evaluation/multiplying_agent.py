"""The agent of `make demo-agent`: it offers the model a tool that multiplies, and needs nothing but OpenAI's client."""

import json
from typing import Any

import httpx
from openai import AsyncOpenAI

MULTIPLY: Any = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "The product of two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
# The model has never seen a tool. One call, for a question that is put in another way, makes it call now and then.
CALL = {"id": "1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 31, "b": 12}'}}
SHOWN: list[Any] = [
    {"role": "user", "content": "Multiply 31 and 12."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "372"},
    {"role": "assistant", "content": "372"},
]


async def solve(example: Any, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> float | None:
    """Let the model answer a question, with the tool if it calls it, and return the reward of its final answer."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    messages = [*SHOWN, {"role": "user", "content": example.prompt}]
    for _ in range(2):
        reply = await client.chat.completions.create(model=example.model, messages=messages, tools=[MULTIPLY])
        message = reply.choices[0].message
        if not message.tool_calls:
            reward: float | None = await example.score(message.content or "")
            return reward
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": multiply(call.function.arguments)}
            for call in message.tool_calls
        ]
    return 0.0


def multiply(arguments: str) -> str:
    """Return the tool's result for the arguments that the model wrote, or the error."""
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) * int(numbers["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"
