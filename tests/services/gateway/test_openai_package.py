"""The openai package as an agent's client: whole replies, streams, tools, errors, the session as API key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.core.endpoints import ENDPOINTS_VARIABLE
from tests.services.gateway.conftest import ADD
from tests.services.gateway.fake_engine import FakeEngine, running
from tests.waiting import IDLE_SECONDS

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>'
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def scripted(directory: Path, texts: list[str]) -> Callable[[dict[str, Any]], list[int]]:
    """Return an engine's answers: each text once, the last one for ever."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)

    def answer(_request: dict[str, Any]) -> list[int]:
        text = texts.pop(0) if len(texts) > 1 else texts[0]
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    return answer


async def test_async_client_with_tools_and_streams(models: Any, start_service: Any, tmp_path: Path) -> None:
    directory = models("qwen2.5")
    async with running(FakeEngine(scripted(directory, [CALL, "It is 42.", "Bye."]))) as engine:
        mapping = {"rollout-server-0:30000": f"127.0.0.1:{engine.port}", "gateway-0:8005": "127.0.0.1:0"}
        service = start_service(
            "services.gateway",
            healthy=False,
            MODEL_NAME=str(directory),
            GATEWAY_DIR=str(tmp_path),
            **{ENDPOINTS_VARIABLE: json.dumps(mapping)},
        )
        service.wait_healthy()
        async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=IDLE_SECONDS) as trainer:
            await trainer.post("/sessions", json={"id": "e-1", "max_turns": 3})
            client = openai.AsyncOpenAI(base_url=f"{service.url}/sessions/e-1/v1", api_key="any")
            assert [model.id async for model in client.models.list()] == [str(directory)]
            tools: Any = [ADD]
            first = await client.chat.completions.create(model="m", messages=HELLO, tools=tools)
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls"
            assert message.tool_calls is not None
            call: Any = message.tool_calls[0]
            assert json.loads(call.function.arguments) == {"a": 12, "b": 30}
            messages = [*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
            text, usage = "", None
            async for chunk in await client.chat.completions.create(
                model="m", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
            ):
                usage = chunk.usage or usage
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
            assert text == "It is 42."
            assert usage is not None
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Thanks"}]
            by_key = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="e-1")
            last = await by_key.chat.completions.create(model="m", messages=messages, tools=tools)
            assert last.choices[0].message.content == "Bye."
            with pytest.raises(
                openai.RateLimitError, match=r"3 turns \(AGENT_MAX_TURNS\); stop the agent's loop"
            ) as limit:
                await by_key.chat.completions.create(model="m", messages=[*messages, *HELLO])
            assert limit.value.code == "max_turns"
            with pytest.raises(openai.AuthenticationError):
                await openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="e-2").models.list()
            trace = (await trainer.post("/sessions/e-1/finish")).json()
            assert (len(trace["sequences"]), trace["turns"], trace["branches"], trace["tool_calls"]) == (1, 3, 0, 1)
            assert sum(trace["sequences"][0]["loss_mask"]) == engine.completion_tokens
            await _check_sync_client(service.url, trainer)


async def _check_sync_client(url: str, trainer: httpx.AsyncClient) -> None:
    import asyncio

    await trainer.post("/sessions", json={"id": "e-3"})

    def play() -> tuple[str | None, list[str | None]]:
        client = openai.OpenAI(base_url=f"{url}/sessions/e-3/v1", api_key="e-3")
        whole = client.chat.completions.create(model="m", messages=HELLO, n=2)
        stream = client.chat.completions.create(model="m", messages=HELLO, n=2, stream=True)
        texts = {0: "", 1: ""}
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert list(texts.values()) == [choice.message.content for choice in whole.choices]
        return whole.choices[0].message.content, list(texts.values())

    assert await asyncio.to_thread(play) == ("Bye.", ["Bye.", "Bye."])
