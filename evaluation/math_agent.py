"""The built-in agent: solves a question with the tools ``add`` and ``multiply``, through the OpenAI Agents SDK.

It is also an example to start from: an agent is an ``async def`` that has the parameters of ``solve`` and returns a
reward.
"""

from __future__ import annotations

import httpx
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    TResponseInputItem,
    function_tool,
)
from openai import AsyncOpenAI

from services.agents import Example

MAX_TURNS = 8
INSTRUCTIONS = """You solve mathematical problems. Compute with the tools, one call at a time: add(a, b) is the sum and
multiply(a, b) the product of two numbers. When you know the result, give it as the final answer."""
SOLVED: list[TResponseInputItem] = [
    {"role": "user", "content": "What is 3 + 4?"},
    {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>',
    },
]
"""A call in the form of Hermes and Qwen models: small models do not call a tool without an example, and a chat template
may drop the tools."""


@function_tool  # type: ignore[untyped-decorator]
def add(a: float, b: float) -> float:
    """The sum of a and b."""
    return _plain(a + b)


@function_tool  # type: ignore[untyped-decorator]
def multiply(a: float, b: float) -> float:
    """The product of a and b."""
    return _plain(a * b)


async def solve(example: Example, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> float | None:
    """Let the model solve ``example``, and return the reward of its final answer."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    agent = Agent(
        name="mathematician",
        instructions=INSTRUCTIONS,
        tools=[add, multiply],
        model=OpenAIChatCompletionsModel(model=example.model, openai_client=client),
    )
    question: TResponseInputItem = {"role": "user", "content": example.prompt}
    # Traces would go to OpenAI.
    config = RunConfig(tracing_disabled=True)
    try:
        run = await Runner.run(agent, [*SOLVED, question], max_turns=MAX_TURNS, run_config=config)
    except (MaxTurnsExceeded, ModelBehaviorError):
        # The model never came to an answer, or called an unknown tool: a wrong answer, not a failure.
        return 0.0
    return await example.score(str(run.final_output))


def _plain(number: float) -> float:
    """Return 12 rather than 12.0, as people and models write it."""
    return int(number) if number.is_integer() else number
