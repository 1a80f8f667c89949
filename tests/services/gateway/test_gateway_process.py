"""The gateway as a process: killed in mid-run it loses no call, and it keeps many sessions going at once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.clients.gateway import GatewayClient
from services.core.endpoints import ENDPOINTS_VARIABLE, Endpoint
from services.http.client import RequestRefusedError
from services.protocol.sessions import CreateSessionRequest, Trace
from tests.services.gateway.fake_engine import FakeEngine, running
from tests.waiting import IDLE_SECONDS, eventually

TURNS = 4


def seeded(request: dict[str, Any]) -> list[int]:
    """Return tokens that depend on prompt and seed alone, as a deterministic engine's do."""
    sampling = request["sampling_params"]
    digest = hashlib.blake2b(json.dumps([request["input_ids"], sampling["sampling_seed"]]).encode()).hexdigest()
    draw = random.Random(digest)
    return [*(draw.randrange(10, 200) for _ in range(draw.randrange(5, 20))), 2]


def start(
    start_service: Any,
    directory: Path,
    engine: FakeEngine,
    where: Path,
    port: int | None = None,
    rank: int = 0,
    nodes: int = 1,
) -> Any:
    mapping = {"rollout-server-0:30000": f"127.0.0.1:{engine.port}", f"gateway-{rank}:8005": "127.0.0.1:0"}
    return start_service(
        "services.gateway",
        port=port,
        healthy=False,
        MODEL_NAME=str(directory),
        GATEWAY_DIR=str(where),
        SKYPILOT_NODE_RANK=str(rank),
        SKYPILOT_NUM_NODES=str(nodes),
        **{ENDPOINTS_VARIABLE: json.dumps(mapping)},
    )


async def play(
    http: httpx.AsyncClient, session: str, times: list[float] | None = None, turns: int = TURNS, url: str | None = None
) -> None:
    """Play an episode of some turns; ask again whenever the gateway does not answer."""
    url = url or f"/sessions/{session}/v1/chat/completions"
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn} of {session}"})
        while True:
            started = time.perf_counter()
            try:
                reply = await http.post(url, json={"messages": messages})
            except httpx.TransportError:
                await asyncio.sleep(0.05)
                continue
            if reply.status_code == 200:
                break
            assert reply.status_code == 503, reply.text
            await asyncio.sleep(0.05)
        if times is not None:
            times.append(time.perf_counter() - started)
        messages.append(reply.json()["choices"][0]["message"])


async def episodes(client: GatewayClient, http: httpx.AsyncClient, names: list[str]) -> list[Trace]:
    """Play an episode a name, all at once, and return their traces."""
    for number, name in enumerate(names):
        await client.create(CreateSessionRequest(id=name, seed=number))
    await asyncio.gather(*(play(http, name) for name in names))
    return [await client.finish(name, 1.0) for name in names]


async def test_kill_9_in_mid_run_changes_no_trace(models: Any, start_service: Any, tmp_path: Path) -> None:
    directory = models("qwen2.5")
    names = [f"s{number}" for number in range(6)]
    async with running(FakeEngine(seeded)) as engine:
        engine.seconds = 0.15
        service = start(start_service, directory, engine, tmp_path / "undisturbed")
        await asyncio.to_thread(service.wait_healthy)
        async with (
            GatewayClient(Endpoint("127.0.0.1", service.port)) as client,
            httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=60) as http,
        ):
            wanted = await episodes(client, http, names)
            with pytest.raises(RequestRefusedError, match="404"):
                await client.finish("nobody", 1.0)
        service.end()

        service = start(start_service, directory, engine, tmp_path / "killed")
        await asyncio.to_thread(service.wait_healthy)
        async with (
            GatewayClient(Endpoint("127.0.0.1", service.port)) as client,
            httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=60) as http,
        ):
            played = asyncio.create_task(episodes(client, http, names))
            before = len(engine.requests)
            for answers in (9, 17):
                enough = before + answers
                await eventually(lambda enough=enough: len(engine.requests) >= enough, every=0.01)
                service.kill()
                service = start(start_service, directory, engine, tmp_path / "killed", service.port)
                await asyncio.to_thread(service.wait_healthy)
            # Only a gateway that was killed is asked again.
            assert [trace.model_copy(update={"calls_repeated": 0}) for trace in await played] == wanted
    assert all(trace.turns == TURNS and len(trace.sequences) == 1 for trace in wanted)


async def test_the_nodes_of_a_gateway_share_its_sessions(
    models: Any, start_service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"s-{number}-first" for number in range(12)]
    async with running(FakeEngine(seeded)) as engine:
        services = [
            start(start_service, models("qwen2.5"), engine, tmp_path / "sessions", rank=rank, nodes=2)
            for rank in (0, 1)
        ]
        mapping = {f"gateway-{rank}:8005": f"127.0.0.1:{service.port}" for rank, service in enumerate(services)}
        monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(mapping))
        async with GatewayClient() as client, httpx.AsyncClient(trust_env=False, timeout=60) as http:
            await client.wait_healthy(IDLE_SECONDS)
            for number, name in enumerate(names):
                await client.create(CreateSessionRequest(id=name, seed=number))
            urls = {name: client.agent_url(name) for name in names}
            assert all(
                client.agent_url(f"{name[:-5]}second").startswith(url[: -len(f"{name}/v1")])
                for name, url in urls.items()
            )
            for service in services:
                stats = (await http.get(f"{service.url}/stats")).json()
                assert 3 <= stats["open_sessions"] == sum(url.startswith(service.url) for url in urls.values())
            await asyncio.gather(*(play(http, name, url=f"{urls[name]}/chat/completions") for name in names))
            stats = await client.stats()
            assert (stats.open_sessions, stats.nodes) == (12, 2)
            traces = [await client.finish(name, 1.0) for name in names]
            assert sum(trace.sampled_tokens for trace in traces) == stats.open_tokens == stats.engine_tokens
        assert sorted(os.listdir(tmp_path)) == ["sessions", "sessions-1"]
        async with GatewayClient() as client:
            await client.wait_healthy(IDLE_SECONDS)
            for name in names:
                with pytest.raises(RequestRefusedError, match="404"):
                    await client.session(name)


async def test_64_sessions_at_once(
    models: Any, start_service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"s{number}" for number in range(64)]
    async with running(FakeEngine(seeded)) as engine:
        service = start(start_service, models("qwen2.5"), engine, tmp_path)
        await asyncio.to_thread(service.wait_healthy)
        async with (
            GatewayClient(Endpoint("127.0.0.1", service.port)) as client,
            httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=60) as http,
        ):
            await asyncio.gather(
                *(client.create(CreateSessionRequest(id=name, seed=number)) for number, name in enumerate(names))
            )
            times: list[float] = []
            started = time.perf_counter()
            await asyncio.gather(*(play(http, name, times, turns=8) for name in names))
            seconds = time.perf_counter() - started
            traces = await asyncio.gather(*(client.finish(name, 1.0) for name in names))
    with capsys.disabled():
        print(
            f"\n{len(times)} calls of 64 sessions: {len(times) / seconds:.0f} a second, "
            f"median {statistics.median(times) * 1000:.0f} ms (clients and engine in one process)"
        )
    assert sum(trace.sampled_tokens for trace in traces) == engine.completion_tokens
    assert all(len(trace.sequences) == 1 for trace in traces)
