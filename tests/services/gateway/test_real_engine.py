"""The gateway in front of the embedded engine: real tokens, log-probabilities, seeds and versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from services.clients.gateway import GatewayClient
from services.core.endpoints import ENDPOINTS_VARIABLE, Endpoint
from services.protocol.sessions import CreateSessionRequest, Trace
from tests.waiting import IDLE_SECONDS


async def test_the_engines_log_probabilities_of_the_whole_sequence_are_those_of_the_trace(
    start_service: Any, tiny_model: Path
) -> None:
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
        traces = [await _episode(client, http, name) for name in ("one", "two")]
        sampled = [trace.sequences[0] for trace in traces]
        assert sampled[0] == sampled[1]  # the same seed samples the same tokens
        [sequence] = traces[0].sequences
        ids = sequence.prompt_ids + sequence.completion_ids
        rescoring = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        reply = (await http.post(f"{engine.url}/generate", json=rescoring)).json()
        scored = [pair[0] for pair in reply["meta_info"]["input_token_logprobs"]][len(sequence.prompt_ids) :]
        trained = [place for place, is_trained in enumerate(sequence.loss_mask) if is_trained]
        assert len(trained) == traces[0].sampled_tokens
        assert max(abs(scored[place] - sequence.logprobs[place]) for place in trained) < 1e-4
        assert {span.version for span in sequence.policy_versions} == {0}


async def _episode(client: GatewayClient, http: httpx.AsyncClient, name: str) -> Trace:
    """Ask three questions in one conversation; one answer may be cut off."""
    await client.create(CreateSessionRequest(id=name, seed=1, max_turn_tokens=4))
    messages: list[dict[str, str]] = []
    for question in ("3+4=", "9-2=", "5+5="):
        messages.append({"role": "user", "content": question})
        reply = await http.post(f"{client.agent_url(name)}/chat/completions", json={"messages": messages})
        messages.append(reply.raise_for_status().json()["choices"][0]["message"])
    await client.reward(name, 1.0)
    trace = await client.finish(name)
    await client.delete(name)
    assert trace.reward == 1.0
    return trace
