"""Agents for the tiny model, which reads and writes sums: they speak to it through OpenAI's own client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from openai import AsyncOpenAI

from services.agents import Example
from services.environment_server.environments import Conversation, Transition
from services.protocol.evaluation import Action, State

Messages = list[dict[str, str]]


class Asking:
    """A conversation with the model of an example."""

    def __init__(self, example: Example, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> None:
        self.example = example
        self.client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)

    async def say(self, messages: Messages, **fields: Any) -> str:
        reply = await self.client.chat.completions.create(model=self.example.model, messages=messages, **fields)  # type: ignore[arg-type]
        return reply.choices[0].message.content or ""


async def twice(example: Example, **endpoint: Any) -> float | None:
    """Ask twice in one conversation, and score the second answer."""
    asking = Asking(example, **endpoint)
    messages = [{"role": "user", "content": example.prompt}]
    messages.append({"role": "assistant", "content": await asking.say(messages)})
    messages.append({"role": "user", "content": f" {example.prompt}"})
    return await example.score(await asking.say(messages))


async def moody(example: Example, **endpoint: Any) -> float | None:
    """Ask as ``twice`` does, but by the sum of the digits also forget the first turn, or fail."""
    mood = sum(map(int, filter(str.isdecimal, example.prompt))) % 4
    asking = Asking(example, **endpoint)
    first = await asking.say([{"role": "user", "content": example.prompt}])
    if mood == 0 and len(first) != 1:
        raise ValueError(f"not one digit: {first!r}")
    if mood == 1:
        return await example.score(await asking.say([{"role": "user", "content": f"{example.prompt[:2]} {first}="}]))
    messages = [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": first}]
    messages.append({"role": "user", "content": f" {example.prompt}"})
    return await example.score(await asking.say(messages))


async def programmer(example: Example, **endpoint: Any) -> float | None:
    """Have a program scored that prints the model's answer."""
    said = await Asking(example, **endpoint).say([{"role": "user", "content": example.prompt}])
    return await example.score(f"```python\nprint({said})\n```")


async def hasty(example: Example, **endpoint: Any) -> float:
    """Ask three times, of which twice at once, and leave without waiting for the last answer."""
    asking = Asking(example, **endpoint)
    messages = [{"role": "user", "content": example.prompt}]
    first = await asking.say(messages)
    messages.append({"role": "assistant", "content": first})
    both = [[*messages, {"role": "user", "content": question}] for question in ("1+1=", "2+2=")]
    answers = await asyncio.gather(*map(asking.say, both))
    leaving = asyncio.ensure_future(asking.say([*both[0], {"role": "assistant", "content": answers[0]}, *messages]))
    await asyncio.sleep(0.01)
    leaving.cancel()
    return float(len(first))


class Moods(Conversation):
    """Three sums to answer; an answer of an odd number of characters has the reward 0.5."""

    deterministic = True

    async def reset(self, seed: int) -> State:
        """Ask the first sum."""
        self.seed, self.left = seed, 3
        self.messages: Messages = []
        self._ask()
        return list(self.messages)

    async def step(self, action: Action) -> Transition:
        """Reward the answer and ask the next sum."""
        text = str(action)
        self.left -= 1
        self.messages.append({"role": "assistant", "content": text})
        self._ask()
        return Transition(list(self.messages), 0.5 * (len(text) % 2), terminated=self.left == 0)

    def _ask(self) -> None:
        self.messages.append({"role": "user", "content": f"{self.seed % 7}+{self.left}="})
