"""Gateways as the nodes of one gateway share its sessions, which end once their traces are there."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.clients.gateway import GatewayClient
from services.core.endpoints import ENDPOINTS_VARIABLE, Endpoint
from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from services.http.client import RequestRefusedError
from services.protocol.sessions import CreateSessionRequest
from tests.services.gateway.client_service import serving_gateway
from tests.services.gateway.fake_engine import FakeEngine, running
from tests.services.run_page.serving import served_ready
from tests.waiting import IDLE_SECONDS


def seeded(request: dict[str, Any]) -> list[int]:
    """Return tokens that depend on prompt and seed alone, as a deterministic engine's do."""
    sampling = request["sampling_params"]
    digest = hashlib.blake2b(json.dumps([request["input_ids"], sampling["sampling_seed"]]).encode()).hexdigest()
    draw = random.Random(digest)
    return [*(draw.randrange(10, 200) for _ in range(draw.randrange(5, 20))), 2]


async def play(http: httpx.AsyncClient, url: str) -> None:
    """Play an episode of two turns."""
    messages: list[dict[str, Any]] = []
    for turn in range(2):
        messages.append({"role": "user", "content": f"question {turn}"})
        reply = await http.post(f"{url}/chat/completions", json={"messages": messages})
        messages.append(reply.raise_for_status().json()["choices"][0]["message"])


async def test_the_nodes_of_a_gateway_share_its_sessions(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"s-{number}-first" for number in range(12)]
    settings = {"model_name": str(models("qwen2.5")), "gateway_dir": tmp_path / "sessions"}
    monkeypatch.setenv("SKYPILOT_NUM_NODES", "2")
    async with running(FakeEngine(seeded)) as engine:
        mapping = {"rollout-server-0:30000": f"127.0.0.1:{engine.port}"}
        monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(mapping))
        monkeypatch.setenv("SKYPILOT_NODE_RANK", "1")
        with served_ready(create_app(GatewaySettings(**settings))) as second:
            monkeypatch.setenv("SKYPILOT_NODE_RANK", "0")
            with served_ready(create_app(GatewaySettings(**settings))) as first:
                nodes = (first, second)
                mapping |= {f"gateway-{rank}:8005": url.removeprefix("http://") for rank, url in enumerate(nodes)}
                monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(mapping))
                await share(nodes, names)
                assert sorted(os.listdir(tmp_path)) == ["sessions", "sessions-1"]
                async with GatewayClient() as client:
                    await client.wait_healthy(IDLE_SECONDS)
                    for name in names:
                        with pytest.raises(RequestRefusedError, match="404"):
                            await client.session(name)


async def share(nodes: tuple[str, ...], names: list[str]) -> None:
    """Play an episode a name by a client that finds the nodes."""
    async with GatewayClient() as client, httpx.AsyncClient(trust_env=False, timeout=IDLE_SECONDS) as http:
        await client.wait_healthy(IDLE_SECONDS)
        for number, name in enumerate(names):
            await client.create(CreateSessionRequest(id=name, seed=number))
        urls = {name: client.agent_url(name) for name in names}
        for name, url in urls.items():
            # All attempts at an episode are at one node.
            assert client.agent_url(f"{name[:-5]}second").startswith(url[: -len(f"{name}/v1")])
        for node in nodes:
            stats = (await http.get(f"{node}/stats")).json()
            assert 3 <= stats["open_sessions"] == sum(url.startswith(node) for url in urls.values())
        await asyncio.gather(*(play(http, url) for url in urls.values()))
        total = await client.stats()
        assert (total.open_sessions, total.nodes) == (12, 2)
        traces = [await client.finish(name, 1.0) for name in names]
        assert sum(trace.sampled_tokens for trace in traces) == total.open_tokens == total.engine_tokens


async def test_sessions_are_deleted_once_their_traces_are_there_and_a_gateway_that_is_gone_is_left(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.clients.gateway.DELETE_SECONDS", 0.1)
    async with running(FakeEngine(seeded)) as engine, contextlib.AsyncExitStack() as stack:
        with serving_gateway(models("qwen2.5"), f"http://127.0.0.1:{engine.port}", tmp_path) as url:
            client = GatewayClient(Endpoint("127.0.0.1", int(url.rpartition(":")[2])))
            await stack.enter_async_context(client)
            for name in ("one", "two"):
                await client.create(CreateSessionRequest(id=name, seed=1))
            await client.finish("one", 1.0)
            with pytest.raises(RequestRefusedError, match="404"):
                await client.finish("nobody", 1.0)
            assert (await client.session("one")).status == "finished"
            await client.finish("two", 1.0)
            with pytest.raises(RequestRefusedError, match="404"):
                await client.session("one")
