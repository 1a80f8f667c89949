"""Agent frameworks that nobody here wrote, by all APIs that they have, with and without streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.services.gateway.client_service import QUESTION, THANKS, Service, add, serving_clients


@pytest.fixture(scope="module")
def service(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving_clients(models("qwen2.5"), tmp_path_factory.mktemp("gateway")) as made:
        yield made


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
async def test_openai_agents(service: Service, api: str) -> None:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    made = {"responses": agents.OpenAIResponsesModel, "chat_completions": agents.OpenAIChatCompletionsModel}[api]
    for streams in (False, True):
        session = service.open()
        client = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=session)
        agent = agents.Agent(
            name="adder", instructions="Be brief.", model=made("m", client), tools=[agents.function_tool(add)]
        )
        if streams:
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            kinds = {event.type async for event in streamed.stream_events()}
            assert kinds > {"raw_response_event", "run_item_stream_event"}
            result: Any = streamed
        else:
            result = await agents.Runner.run(agent, QUESTION)
        assert result.final_output == "It is 42."
        conversation = [*result.to_input_list(), {"role": "user", "content": THANKS}]
        assert (await agents.Runner.run(agent, conversation)).final_output == "Bye."
        service.check(session, 3)


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
async def test_pydantic_ai(service: Service, api: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    seen: list[str] = []

    async def drain(_context: Any, events: Any) -> None:
        """Read the events of a streamed answer."""
        seen.extend([event.event_kind async for event in events])

    for streams in (False, True):
        session = service.open()
        if api == "anthropic":
            agent: Any = Agent(AnthropicModel("m", provider=AnthropicProvider(api_key=session, base_url=service.url)))
        else:
            provider = OpenAIProvider(base_url=f"{service.url}/v1", api_key=session)
            agent = Agent({"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api]("m", provider=provider))
        agent.tool_plain(add)
        result = await agent.run(QUESTION, event_stream_handler=drain if streams else None)
        assert result.output == "It is 42."
        assert (await agent.run(THANKS, message_history=result.all_messages())).output == "Bye."
        service.check(session, 3)
        assert ("part_start" in seen) is streams
