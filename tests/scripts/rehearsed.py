"""Rewards, agents and an environment with mistakes, each of which a rehearsal finds."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from services.agents import Example
from services.environment_server.environments import Conversation, Transition
from services.protocol.evaluation import Action, State

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]


def constant(response: str) -> float:
    """Give every answer the same reward."""
    return 0.5


def raising(response: str, ground_truth: str) -> float:
    """Fail at answers without a digit."""
    return float(ground_truth == response[response.index(ground_truth[0])])


def nan(response: str) -> float:
    """Return no number for an answer without words."""
    return float("nan") if not response else 0.0


async def silent(example: Example, **endpoint: Any) -> float:
    """Return a reward without an answer."""
    return 1.0


async def with_tools(example: Example, **endpoint: Any) -> float:
    """Offer a tool."""
    client = AsyncOpenAI(**endpoint)
    messages: Any = [{"role": "user", "content": example.prompt}]
    reply = await client.chat.completions.create(model=example.model, messages=messages, tools=TOOLS)  # type: ignore[call-overload]
    return float(len(reply.choices[0].message.content or "") % 2)


class Broken(Conversation):
    """An environment whose episodes cannot begin."""

    async def reset(self, seed: int) -> State:
        """Fail."""
        raise FileNotFoundError("levels.txt is missing")

    async def step(self, action: Action) -> Transition:
        """End the episode, which never begins."""
        return Transition([], 0.0, terminated=True)
