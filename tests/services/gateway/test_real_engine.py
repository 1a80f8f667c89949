"""The gateway in front of a real router and engine: the same tests against the embedded engine and the real SGLang."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from services.clients.gateway import GatewayClient
from services.core.endpoints import ENDPOINTS_VARIABLE, Endpoint
from services.protocol.sessions import CreateSessionRequest, Trace, TraceSequence
from tests.services.rollout_server.conftest import server
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.tolerance import engine_tolerance
from tests.waiting import IDLE_SECONDS

__all__ = ["server"]
pytestmark = pytest.mark.slow

QUESTIONS = ("3+4=", "9-2=", "5+5=")


@pytest.fixture(scope="module")
def gateway(server: Nodes, start_service_once: Any) -> Iterator[Endpoint]:
    """A gateway in front of the server's router."""
    mapping = {"rollout-server-0:30000": server.router.url.removeprefix("http://"), "gateway-0:8005": "127.0.0.1:0"}
    service = start_service_once(
        "services.gateway",
        MODEL_NAME=str(server.model),
        JOBGROUP_TOKEN=TOKEN,
        **{ENDPOINTS_VARIABLE: json.dumps(mapping)},
    )
    yield Endpoint("127.0.0.1", service.port)
    service.end()


class Episode:
    """An open session, as agent and trainer see it."""

    def __init__(self, client: GatewayClient, http: httpx.AsyncClient, name: str) -> None:
        self._client, self._http, self._name = client, http, name
        self.messages: list[dict[str, Any]] = []

    async def ask(self, question: str, **fields: Any) -> dict[str, Any]:
        """Ask a question after the conversation so far, which goes on with the first choice; return the reply."""
        self.messages.append({"role": "user", "content": question})
        reply = await self.post({"messages": self.messages, **fields})
        assert reply.status_code == 200, reply.text
        body: dict[str, Any] = reply.json()
        self.messages.append(body["choices"][0]["message"])
        return body

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        url = f"{self._client.agent_url(self._name)}/chat/completions"
        return await self._http.post(url, json=body, headers={"Authorization": f"Bearer {self._name}"})

    async def trace(self) -> Trace:
        return await self._client.finish(self._name, 1.0)


@asynccontextmanager
async def episode(gateway: Endpoint, name: str, **limits: Any) -> AsyncIterator[Episode]:
    async with (
        GatewayClient(gateway, TOKEN) as client,
        httpx.AsyncClient(trust_env=False, timeout=IDLE_SECONDS) as http,
    ):
        await client.create(CreateSessionRequest(id=name, **{"seed": 1, "max_turn_tokens": 4, **limits}))
        yield Episode(client, http, name)


def generate(server: Nodes, ids: list[int], **fields: Any) -> dict[str, Any]:
    """The ``meta_info`` of token ids sent to the worker itself."""
    reply = server.post(server.worker(), "/generate", {"input_ids": ids, "return_logprob": True, **fields})
    assert reply.status_code == 200, reply.text
    meta: dict[str, Any] = reply.json()["meta_info"]
    return meta


def rescored(server: Nodes, sequence: TraceSequence) -> list[float]:
    """The engine's log-probabilities of a sequence's completion, computed at once."""
    ids = sequence.prompt_ids + sequence.completion_ids.tolist()
    meta = generate(server, ids, sampling_params={"max_new_tokens": 0}, logprob_start_len=0)
    return [pair[0] for pair in meta["input_token_logprobs"]][len(sequence.prompt_ids) :]


def trained(sequence: TraceSequence) -> list[int]:
    return [place for place, is_trained in enumerate(sequence.mask) if is_trained]


def check_logprobs(server: Nodes, trace: Trace) -> None:
    """Check that each sampled token is trained once, with the log-probability that the engine gives it at once."""
    assert sum(len(trained(sequence)) for sequence in trace.sequences) == trace.sampled_tokens
    for sequence in trace.sequences:
        scores = rescored(server, sequence)
        given = [sequence.logprobs[place] for place in trained(sequence)]
        assert given == pytest.approx([scores[place] for place in trained(sequence)], abs=engine_tolerance())


async def test_the_engine_has_the_conversation_in_its_cache(server: Nodes, gateway: Endpoint) -> None:
    async with episode(gateway, "cached") as one:
        for question in QUESTIONS:
            await one.ask(question)
        [sequence] = (await one.trace()).sequences
    ids = sequence.prompt_ids + sequence.completion_ids.tolist()
    meta = generate(server, ids, sampling_params={"max_new_tokens": 1})
    # The last token is always computed.
    assert meta["cached_tokens"] == len(ids) - 1
    assert generate(server, ids, sampling_params={"max_new_tokens": 1}, logprob_start_len=0)["cached_tokens"] == 0


async def test_weights_that_change_between_turns_show_in_the_versions(server: Nodes, gateway: Endpoint) -> None:
    async with (
        server.admin() as worker,
        episode(gateway, "versions") as one,
    ):
        await one.ask(QUESTIONS[0])
        await worker.load_model(server.model, 1)
        try:
            await one.ask(QUESTIONS[1])
            trace = await one.trace()
        finally:
            await worker.load_model(server.model, 0)
    [sequence] = trace.sequences
    versions = sequence.policy_versions.tolist()
    assert {versions[place] for place in trained(sequence)} == {0, 1}
    check_logprobs(server, trace)


async def test_the_same_seed_samples_the_same_tokens_with_and_without_the_cache(
    server: Nodes, gateway: Endpoint
) -> None:
    sequences = []
    for name in ("one", "two"):
        async with episode(gateway, name) as one:
            replies = [await one.ask(question) for question in QUESTIONS]
            trace = await one.trace()
            check_logprobs(server, trace)
            assert (trace.reward, len(trace.sequences)) == (1.0, 1)
            assert trace.sampled_tokens == sum(reply["usage"]["completion_tokens"] for reply in replies)
            assert {*trace.sequences[0].policy_versions.tolist()} == {0}
            sequences.append(trace.sequences)
        assert server.post(server.worker(), "/flush_cache", {}).status_code == 200
    # SGLang honours seeds only with --enable-deterministic-inference, which needs a GPU.
    assert server.engine == "sglang" or sequences[0] == sequences[1]
