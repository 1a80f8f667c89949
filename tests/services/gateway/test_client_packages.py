"""Clients that nobody here wrote, in a tool loop against the gateway: the packages anthropic and openai, and curl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.services.gateway.client_service import QUESTION, THANKS, Service, serving_clients
from tests.services.gateway.conftest import ADD


@pytest.fixture(scope="module")
def service(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving_clients(models("qwen2.5"), tmp_path_factory.mktemp("gateway")) as made:
        yield made


ANTHROPIC_ADD: Any = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}
RESPONSES_ADD: Any = {"type": "function", "strict": False, **ADD["function"]}


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
    key = {"Idempotency-Key": "second"}
    with client.messages.stream(messages=messages, extra_headers=key, **asked) as stream:
        assert "".join(stream.text_stream) == "It is 42."
        final = stream.get_final_message()
    again = client.messages.create(messages=messages, extra_headers=key, **asked)
    assert final.model_dump() == again.model_dump()
    assert again.stop_reason == "end_turn"
    messages += [final.to_param(), {"role": "user", "content": THANKS}]
    assert client.messages.create(messages=messages, **asked).content[0].text == "Bye."  # type: ignore[union-attr]
    assert client.messages.count_tokens(model="m", messages=messages, tools=[ANTHROPIC_ADD]).input_tokens > counted
    with pytest.raises(anthropic.RateLimitError, match="reached its limit of 3 turns") as limit:
        client.messages.create(messages=[*messages, {"role": "user", "content": "More"}], **asked)
    assert limit.value.body["type"] == "error"  # type: ignore[index]
    assert limit.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
    service.check(session, 3)
    with pytest.raises(anthropic.ConflictError):
        client.messages.create(messages=messages, **asked)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=service.url, api_key="stranger").messages.create(messages=messages, **asked)
    elsewhere = anthropic.Anthropic(base_url=f"{service.url}/sessions/nobody", api_key="nobody")
    with pytest.raises(anthropic.NotFoundError):
        elsewhere.messages.create(messages=messages, **asked)


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
    key = {"Idempotency-Key": "second"}
    with client.responses.stream(input=items, extra_headers=key, **asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "It is 42."
    again = client.responses.create(input=items, extra_headers=key, **asked)
    assert again.id == final.id
    assert again.usage == final.usage
    items += [*final.output, {"role": "user", "content": THANKS}]
    last = client.responses.create(input=items, **asked)
    assert last.output_text == "Bye."
    assert client.responses.retrieve(last.id) == last
    with pytest.raises(openai.RateLimitError) as limit:
        client.responses.create(input=[*items, *last.output, {"role": "user", "content": "More"}], **asked)
    assert limit.value.code == "max_turns"
    service.check(session, 3)
    for error, key, path in [
        (openai.ConflictError, session, "/v1"),
        (openai.AuthenticationError, "stranger", "/v1"),
        (openai.NotFoundError, "nobody", "/sessions/nobody/v1"),
    ]:
        with pytest.raises(error):
            openai.OpenAI(base_url=service.url + path, api_key=key).responses.create(input=items, **asked)


async def test_openai_chat_completions_async_and_sync(service: Service) -> None:
    import openai

    session = service.open(max_turns=3)
    client = openai.AsyncOpenAI(base_url=f"{service.url}/sessions/{session}/v1", api_key="any")
    assert len([model.id async for model in client.models.list()]) == 1
    asked: dict[str, Any] = {"model": "m", "tools": [ADD]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = (await client.chat.completions.create(messages=messages, **asked)).choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", "I add.")
    [call] = first.message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"a": 12, "b": 30}  # type: ignore[union-attr]
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    text, usage = "", None
    async for chunk in await client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **asked
    ):
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == "It is 42."
    assert usage is not None
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": THANKS}]
    by_key = openai.OpenAI(base_url=f"{service.url}/v1", api_key=session)
    assert by_key.chat.completions.create(messages=messages, **asked).choices[0].message.content == "Bye."
    with pytest.raises(openai.RateLimitError, match="AGENT_MAX_TURNS") as limit:
        by_key.chat.completions.create(messages=[*messages, *messages], **asked)
    assert limit.value.code == "max_turns"
    service.check(session, 3)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="stranger").models.list()
    of_two = openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.open())
    whole = of_two.chat.completions.create(model="m", messages=messages, n=2)
    texts = {0: "", 1: ""}
    for chunk in of_two.chat.completions.create(model="m", messages=messages, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [*texts.values()] == [choice.message.content for choice in whole.choices] == ["Bye.", "Bye."]
