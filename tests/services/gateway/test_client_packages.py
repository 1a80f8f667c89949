"""Clients that nobody here wrote, in a tool loop against a gateway process: packages in all their ways, and curl."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.core.endpoints import ENDPOINTS_VARIABLE
from tests.services.gateway.conftest import ADD
from tests.services.gateway.fake_engine import FakeEngine, running

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

QUESTION = "What is 12+30?"
THANKS = "Thanks"


def model(directory: Path) -> Callable[[dict[str, Any]], list[int]]:
    """Return an engine that calls add where it is offered, repeats a tool's answer, and says goodbye to thanks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)

    def answer(request: dict[str, Any]) -> list[int]:
        prompt = tokenizer.decode(request["input_ids"])
        last = prompt.rsplit("<|im_start|>", 2)[1]
        if answered := re.search(r"<tool_response>\s*(.*?)\s*</tool_response>", last, re.DOTALL):
            text = f"It is {answered[1]}."
        elif "<tools>" in prompt and "+" in last:
            text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>'
        else:
            text = "Bye."
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    return answer


@dataclass
class Service:
    """A gateway in a process of its own, and the sessions that the tests opened there."""

    url: str
    sessions: list[str] = field(default_factory=list)

    def open(self, **limits: Any) -> str:
        """Open a session and return its id."""
        session = f"s{len(self.sessions)}"
        self._ask("POST", "/sessions", json={"id": session, **limits})
        self.sessions.append(session)
        return session

    def finish(self, session: str) -> dict[str, Any]:
        """Finish a session and return its trace."""
        trace: dict[str, Any] = self._ask("POST", f"/sessions/{session}/finish").json()
        return trace

    def check(self, session: str, turns: int) -> list[dict[str, Any]]:
        """Finish a session; it must be one sequence of so many turns. Return its messages."""
        trace = self.finish(session)
        assert (trace["turns"], len(trace["sequences"]), trace["branches"]) == (turns, 1, 0)
        assert sum(trace["sequences"][0]["loss_mask"]) == trace["sampled_tokens"]
        messages: list[dict[str, Any]] = trace["messages"]
        return messages

    def _ask(self, method: str, path: str, **fields: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, trust_env=False, timeout=60, **fields).raise_for_status()


@pytest.fixture(scope="module")
def service(
    models: Callable[[str], Path], start_service_once: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A gateway; in the end, its traces must have every token that its engine sampled, and no prefix may be broken."""
    directory = models("qwen2.5")
    engine = FakeEngine(model(directory))
    runner = _in_thread(engine)
    next(runner)
    mapping = {"rollout-server-0:30000": f"127.0.0.1:{engine.port}", "gateway-0:8005": "127.0.0.1:0"}
    process = start_service_once(
        "services.gateway",
        MODEL_NAME=str(directory),
        GATEWAY_DIR=str(tmp_path_factory.mktemp("gateway")),
        **{ENDPOINTS_VARIABLE: json.dumps(mapping)},
    )
    made = Service(process.url)
    yield made
    traces = [made.finish(session) for session in made.sessions]
    assert sum(trace["sampled_tokens"] for trace in traces) == engine.completion_tokens > 0
    assert not any(trace["lost_tokens"] for trace in traces)
    metrics = httpx.get(made.url + "/metrics", trust_env=False).text
    assert "gateway_broken_prefixes_total 0.0" in metrics
    process.end()
    runner.close()


def _in_thread(engine: FakeEngine) -> Iterator[None]:
    """Serve an engine, whose event loop is that of no test."""
    loop, started, stopped = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with running(engine):
            started.set()
            await stopped.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    started.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()


def add(a: int, b: int) -> str:
    """Return the sum of two numbers."""
    return str(a + b)


ANTHROPIC_ADD: Any = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}
RESPONSES_ADD: Any = {"type": "function", "strict": False, **ADD["function"]}


def roles(messages: list[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]


def test_anthropic_sync(service: Service) -> None:
    import anthropic

    session = service.open(max_turns=3)
    client = anthropic.Anthropic(base_url=service.url, api_key=session)
    asked: dict[str, Any] = {"model": "m", "max_tokens": 100, "system": "Be brief.", "tools": [ANTHROPIC_ADD]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    counted = client.messages.count_tokens(
        model="m", system="Be brief.", tools=[ANTHROPIC_ADD], messages=messages
    ).input_tokens
    first = client.messages.create(messages=messages, **asked)
    assert (first.type, first.role, first.model, first.stop_reason) == ("message", "assistant", "m", "tool_use")
    assert first.usage.input_tokens == counted > 0
    assert first.usage.output_tokens > 0
    text, use = first.content
    assert text.type == "text"
    assert use.type == "tool_use"
    assert (text.text, use.name, use.input) == ("I add.", "add", {"a": 12, "b": 30})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "42"}]}
    messages += [first.to_param(), {"role": "user", "content": [result]}]
    with client.messages.stream(messages=messages, **asked) as stream:
        assert "".join(stream.text_stream) == "It is 42."
        final = stream.get_final_message()
    again = client.messages.create(messages=messages, **asked)
    assert final.model_dump() == again.model_dump()
    assert again.stop_reason == "end_turn"
    messages += [final.to_param(), {"role": "user", "content": THANKS}]
    assert client.messages.create(messages=messages, **asked).content[0].text == "Bye."  # type: ignore[union-attr]
    assert client.messages.count_tokens(model="m", messages=messages, tools=[ANTHROPIC_ADD]).input_tokens > counted
    with pytest.raises(anthropic.RateLimitError, match="has had its 3 turns") as limit:
        client.messages.create(messages=[*messages, {"role": "user", "content": "More"}], **asked)
    assert limit.value.body["type"] == "error"  # type: ignore[index]
    assert limit.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
    said = service.check(session, 3)
    assert roles(said) == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    with pytest.raises(anthropic.ConflictError):
        client.messages.create(messages=messages, **asked)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=service.url, api_key="stranger").messages.create(messages=messages, **asked)
    elsewhere = anthropic.Anthropic(base_url=f"{service.url}/sessions/nobody", api_key="nobody")
    with pytest.raises(anthropic.NotFoundError):
        elsewhere.messages.create(messages=messages, **asked)


async def test_anthropic_async_with_its_own_tool_loop(service: Service) -> None:
    import anthropic

    for streams in (False, True):
        session = service.open()
        client = anthropic.AsyncAnthropic(base_url=f"{service.url}/sessions/{session}", auth_token="any", api_key=None)

        @anthropic.beta_async_tool(name="add")
        async def tool(a: int, b: int) -> str:
            """Adds.

            Args:
                a: a number
                b: a number
            """
            return add(a, b)

        options: Any = {"stream": True} if streams else {}
        runner: Any = client.beta.messages.tool_runner(
            model="m", max_tokens=100, messages=[{"role": "user", "content": QUESTION}], tools=[tool], **options
        )
        final = await runner.until_done()
        assert final.content[0].text == "It is 42."
        assert roles(service.check(session, 2)) == ["user", "assistant", "tool", "assistant"]


def test_openai_responses_sync(service: Service) -> None:
    import openai

    session = service.open(max_turns=3)
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=session)
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: dict[str, Any] = {"model": "m", "instructions": "Be brief.", "tools": [RESPONSES_ADD]}
    first = client.responses.create(input=items, **asked)
    assert (first.status, first.output_text, first.instructions) == ("completed", "I add.", "Be brief.")
    call = first.output[1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"a": 12, "b": 30}
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
    with client.responses.stream(input=items, **asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "It is 42."
    again = client.responses.create(input=items, **asked)
    assert again.id == final.id
    assert again.usage == final.usage
    items += [*final.output, {"role": "user", "content": THANKS}]
    last = client.responses.create(input=items, **asked)
    assert last.output_text == "Bye."
    assert client.responses.retrieve(last.id) == last
    with pytest.raises(openai.RateLimitError) as limit:
        client.responses.create(input=[*items, *last.output], **asked)
    assert limit.value.code == "max_turns"
    said = service.check(session, 3)
    assert roles(said) == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    for error, key, path in [
        (openai.ConflictError, session, "/v1"),
        (openai.AuthenticationError, "stranger", "/v1"),
        (openai.NotFoundError, "nobody", "/sessions/nobody/v1"),
    ]:
        with pytest.raises(error):
            openai.OpenAI(base_url=service.url + path, api_key=key).responses.create(input=items, **asked)


async def test_openai_responses_async_by_previous_response(service: Service) -> None:
    import openai

    session = service.open()
    client = openai.AsyncOpenAI(base_url=f"{service.url}/sessions/{session}/v1", api_key="any")
    asked: dict[str, Any] = {"model": "m", "instructions": "Be brief.", "tools": [RESPONSES_ADD]}
    first: Any = None
    async for event in await client.responses.create(input=QUESTION, stream=True, **asked):
        if event.type == "response.completed":
            first = event.response
    call = first.output[1]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    second = await client.responses.create(input=[output], previous_response_id=first.id, **asked)
    assert (second.output_text, second.previous_response_id) == ("It is 42.", first.id)
    third = await client.responses.create(input=THANKS, previous_response_id=second.id, **asked)
    assert third.output_text == "Bye."
    with pytest.raises(openai.BadRequestError) as unknown:
        await client.responses.create(input=THANKS, previous_response_id="resp_1", **asked)
    assert unknown.value.code == "previous_response_not_found"
    service.check(session, 3)


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


CURL = r"""
set -euo pipefail
messages='{"role": "user", "content": "Hello"}'
for turn in 1 2 3; do
  reply=$(curl --silent --show-error --fail-with-body --noproxy '*' "$OPENAI_BASE_URL/chat/completions" \
    -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
    -d "{\"model\": \"m\", \"messages\": [$messages]}")
  answer=$(sed 's/.*"content":"\([^"]*\)".*/\1/' <<< "$reply")
  echo "$answer"
  messages+=", {\"role\": \"assistant\", \"content\": \"$answer\"}, {\"role\": \"user\", \"content\": \"Go on\"}"
done
"""


def test_curl_in_a_loop(service: Service) -> None:
    session = service.open()
    environment = {"PATH": "/usr/bin:/bin", "OPENAI_BASE_URL": f"{service.url}/v1", "OPENAI_API_KEY": session}
    told = subprocess.run(["bash", "-c", CURL], env=environment, capture_output=True, text=True, timeout=120)
    assert (told.stdout, told.stderr, told.returncode) == ("Bye.\n" * 3, "", 0)
    service.check(session, 3)
