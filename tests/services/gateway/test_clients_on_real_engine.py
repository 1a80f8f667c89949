"""Anthropic's and OpenAI's clients with the embedded engine: its log-probabilities are those of the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from services.clients.gateway import GatewayClient
from services.core.endpoints import ENDPOINTS_VARIABLE, Endpoint
from services.protocol.sessions import CreateSessionRequest, Trace
from tests.waiting import IDLE_SECONDS

QUESTIONS = ("3+4=", "9-2=", "5+5=")


async def test_conversations_by_messages_and_responses(start_service: Any, tiny_model: Path) -> None:
    engine = start_service("services.embedded_engine", healthy=False, MODEL_NAME=str(tiny_model))
    mapping = {"rollout-server-0:30000": f"127.0.0.1:{engine.port}", "gateway-0:8005": "127.0.0.1:0"}
    service = start_service(
        "services.gateway", healthy=False, MODEL_NAME=str(tiny_model), **{ENDPOINTS_VARIABLE: json.dumps(mapping)}
    )
    engine.wait_healthy()
    service.wait_healthy()
    async with (
        GatewayClient(Endpoint("127.0.0.1", service.port)) as client,
        httpx.AsyncClient(trust_env=False, timeout=IDLE_SECONDS) as http,
    ):
        for trace in (await _by_anthropic(client, service.url), await _by_responses(client, service.url)):
            await _check(trace, http, engine.url)


async def _check(trace: Trace, http: httpx.AsyncClient, engine_url: str) -> None:
    """Compare a trace of one sequence with the engine's log-probabilities of the whole sequence."""
    [sequence] = trace.sequences
    rescoring = {
        "input_ids": sequence.prompt_ids + sequence.completion_ids.tolist(),
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    reply = (await http.post(f"{engine_url}/generate", json=rescoring)).json()
    scored = [pair[0] for pair in reply["meta_info"]["input_token_logprobs"]][len(sequence.prompt_ids) :]
    trained = [place for place, is_trained in enumerate(sequence.mask) if is_trained]
    assert (trace.turns, len(trained)) == (3, trace.sampled_tokens)
    assert max(abs(scored[place] - sequence.logprobs[place]) for place in trained) < 1e-4
    assert {*sequence.policy_versions.tolist()} == {0}


async def _by_anthropic(client: GatewayClient, url: str) -> Trace:
    import anthropic

    await client.create(CreateSessionRequest(id="messages", seed=1, max_turn_tokens=4))
    agent = anthropic.AsyncAnthropic(base_url=url, api_key="messages")
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        async with agent.messages.stream(model="m", max_tokens=100, messages=messages) as stream:
            messages.append((await stream.get_final_message()).to_param())
    return await client.finish("messages", 1.0)


async def _by_responses(client: GatewayClient, url: str) -> Trace:
    import openai

    await client.create(CreateSessionRequest(id="responses", seed=1, max_turn_tokens=4))
    agent = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="responses")
    previous: Any = openai.omit
    for question in QUESTIONS:
        previous = (await agent.responses.create(model="m", input=question, previous_response_id=previous)).id
    return await client.finish("responses", 1.0)
