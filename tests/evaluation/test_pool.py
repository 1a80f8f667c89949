"""The pool of servers: work moves away from dead servers, returns to revived ones, and is bounded at each."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from evaluation import pool as pool_module
from evaluation.pool import ServerPool
from evaluation.samples import Kind
from evaluation.server import RolloutServer, Server, parse_url
from evaluation.settings import EvaluationSettings
from services.clients.rollout import ROUTING_KEY, SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.protocol.prompts import Prompt
from tests.toy_models import byte_tokenizer
from tests.waiting import IDLE_SECONDS, eventually


def generated(text: str, tokens: list[int], reason: str = "stop") -> dict[str, Any]:
    logprobs = [[-0.1, token, None] for token in tokens]
    meta = {"output_token_logprobs": logprobs, "weight_version": "1", "finish_reason": {"type": reason}}
    return {"text": text, "meta_info": meta}


class FakeServer:
    """A server that answers /health, /work and /generate, and can be killed and started again."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.at_once = self.most_at_once = 0
        self.is_slow = False
        self.health = 200
        self.token: str | None = None
        self.generated: list[int] = []
        self.adapter: str | None = None
        self.adapters: list[str | None] = []
        self.generate: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: generated("7", [7])
        self.died = asyncio.Event()

    async def ask(self, request: httpx.Request) -> httpx.Response:
        """Answer a request, or fail as a connection does when the server is killed."""
        if self.died.is_set():
            raise httpx.ConnectError("refused", request=request)
        answering, dying = asyncio.create_task(self._answer(request)), asyncio.create_task(self.died.wait())
        try:
            await asyncio.wait({answering, dying}, return_when=asyncio.FIRST_COMPLETED)
            if self.died.is_set():
                raise httpx.ReadError("killed", request=request)
            return answering.result()
        finally:
            answering.cancel()
            dying.cancel()

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/health":
                return httpx.Response(self.health)
            case "/v1/models":
                return httpx.Response(401 if self.token else 200)
            case "/work":
                return await self._work()
        body = json.loads(request.content)
        if body.get("lora_path") not in (None, self.adapter):
            return httpx.Response(400, json={"detail": "not loaded"})
        n = body["sampling_params"].get("n")
        self.generated.append(n or 1)
        self.adapters.append(body.get("lora_path"))
        reply = self.generate(body)
        return httpx.Response(200, json=reply if n in (None, 1) else [reply] * n)

    async def _work(self) -> httpx.Response:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(600 if self.is_slow else 0.01)
        finally:
            self.at_once -= 1
        return httpx.Response(200, json={"url": self.url})


class Network(httpx.AsyncBaseTransport):
    """Connections to fake servers, and to none at other addresses."""

    def __init__(self) -> None:
        self.servers: dict[str, FakeServer] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        server = self.servers.get(str(request.url.copy_with(path="/", query=None)).rstrip("/"))
        if server is None:
            raise httpx.ConnectError("refused", request=request)
        return await server.ask(request)


MakeServer = Callable[[], FakeServer]


@pytest.fixture(autouse=True)
def make_server(monkeypatch: pytest.MonkeyPatch) -> MakeServer:
    network, ports = Network(), itertools.count(1)
    monkeypatch.setattr("services.http.client.pool_for", lambda *_: network)
    monkeypatch.setattr(pool_module, "WATCH_SECONDS", 0.02)

    def make() -> FakeServer:
        server = FakeServer(next(ports))
        network.servers[server.url] = server
        return server

    return make


def pool_of(*servers: FakeServer, places: int = 4, discover: Any = None, **settings: Any) -> ServerPool:
    given = EvaluationSettings(eval_concurrency=places, **settings)
    urls = [server.url for server in servers]
    return ServerPool(urls, lambda url: RolloutServer(url, given, "model", 17), places=places, discover=discover)


async def work(server: Server) -> str:
    response = await server.client.send_once("GET", "/work", seconds=IDLE_SECONDS)
    return str(response.json()["url"])


async def test_work_goes_to_all_servers_within_their_places(make_server: MakeServer) -> None:
    first, second = make_server(), make_server()
    async with pool_of(first, second) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        done = Counter(await asyncio.gather(*(pool.run(work) for _ in range(60))))
    assert sum(done.values()) == 60
    assert min(done[first.url], done[second.url]) >= 20
    assert max(first.most_at_once, second.most_at_once) <= 4
    assert (pool.deaths, pool.moved) == (0, 0)


async def test_a_dead_servers_work_is_done_elsewhere_and_it_gets_work_when_it_is_back(make_server: MakeServer) -> None:
    first, second = make_server(), make_server()
    first.is_slow = True  # holds its work until it dies
    async with pool_of(first, second) as pool, asyncio.timeout(IDLE_SECONDS):
        await pool.wait_ready(IDLE_SECONDS)
        everything = [asyncio.create_task(pool.run(work)) for _ in range(20)]
        await eventually(lambda: first.at_once == 4)
        first.died.set()
        assert Counter(await asyncio.gather(*everything)) == {second.url: 20}
        await eventually(lambda: pool.deaths == 1)
        assert pool.moved >= 4
        second.died.set()
        waiting = asyncio.create_task(pool.run(work))
        await eventually(lambda: not pool.alive)
        first.is_slow = False
        first.died.clear()
        assert await waiting == first.url


async def test_a_server_that_hangs_is_given_up(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "SILENT_SECONDS", 0.3)
    first, second = make_server(), make_server()
    first.is_slow = True
    async with pool_of(first, second, places=1) as pool, asyncio.timeout(IDLE_SECONDS):
        await pool.wait_ready(IDLE_SECONDS)
        everything = [asyncio.create_task(pool.run(work)) for _ in range(4)]
        await eventually(lambda: first.at_once)
        first.health = 503
        assert set(await asyncio.gather(*everything)) == {second.url}


async def test_without_any_server_work_fails_after_its_patience(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LOST_SECONDS", 0.3)
    server = make_server()
    async with pool_of(server) as pool, asyncio.timeout(IDLE_SECONDS):
        await pool.wait_ready(IDLE_SECONDS)
        server.died.set()
        with pytest.raises(DependencyLostError, match=server.url):
            await asyncio.gather(*(pool.run(work) for _ in range(20)))


async def test_work_that_living_servers_lose_is_not_tried_for_ever(make_server: MakeServer) -> None:
    server, tries = make_server(), 0

    async def lose(_server: Server) -> None:
        nonlocal tries
        tries += 1
        raise DependencyLostError("poison")

    async with pool_of(server) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        with pytest.raises(DependencyLostError, match="poison"):
            await pool.run(lose)
        assert await pool.run(work) == server.url
    assert tries == pool_module.MAX_TRIES


async def test_cancelling_ends_the_work_and_frees_the_place(make_server: MakeServer) -> None:
    server = make_server()
    server.is_slow = True
    async with pool_of(server, places=1) as pool, asyncio.timeout(IDLE_SECONDS):
        await pool.wait_ready(IDLE_SECONDS)
        long = asyncio.create_task(pool.run(work))
        await eventually(lambda: server.at_once)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        server.is_slow = False
        assert await pool.run(work) == server.url


async def test_cancelling_ends_work_whose_server_is_found_dead_at_the_same_time(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "SILENT_SECONDS", 0.3)
    server, ended = make_server(), asyncio.Event()
    server.is_slow = True

    async def slow_to_end(at: Server) -> str:
        try:
            return await work(at)
        except asyncio.CancelledError:
            ended.set()
            await asyncio.sleep(0)
            raise

    async with pool_of(server) as pool, asyncio.timeout(IDLE_SECONDS):
        await pool.wait_ready(IDLE_SECONDS)
        job = asyncio.create_task(pool.run(slow_to_end))
        await eventually(lambda: server.at_once)
        server.health = 503
        await ended.wait()
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job


class Stuck(RolloutServer):
    """A server that never answers a first prompt."""

    async def admit(self) -> None:
        await asyncio.Event().wait()


async def test_a_server_that_never_takes_a_prompt_keeps_no_other_from_work(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "ADMISSION_SECONDS", 0.2)
    stuck, good = make_server(), make_server()
    kinds = {stuck.url: Stuck, good.url: RolloutServer}
    pool = ServerPool(list(kinds), lambda url: kinds[url](url, EvaluationSettings(), "model", 17), places=4)
    async with pool, asyncio.timeout(IDLE_SECONDS):
        await pool.wait_ready(IDLE_SECONDS)
        assert {await pool.run(work) for _ in range(8)} == {good.url}
        await eventually(lambda: "first prompt" in pool.servers[stuck.url].problem)


async def test_discovery_adds_servers_and_drops_dead_ones(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "DISCOVER_SECONDS", 0.05)
    first, second = make_server(), make_server()
    found, is_away = [first.url], False

    async def discover() -> list[str]:
        if is_away:
            raise DependencyLostError("the API server is away")
        return list(found)

    async with pool_of(discover=discover) as pool, asyncio.timeout(IDLE_SECONDS):
        await pool.wait_ready(IDLE_SECONDS)
        found.append(second.url)
        await eventually(lambda: len(pool.alive) == 2)
        is_away = True
        await asyncio.sleep(0.2)
        assert len(pool.alive) == 2, "the known servers stay"
        is_away = False
        found.remove(first.url)
        first.died.set()
        await eventually(lambda: first.url not in pool.servers)
        assert await pool.run(work) == second.url


async def test_a_server_that_is_not_there_or_refuses_the_token_is_named(make_server: MakeServer) -> None:
    server = make_server()
    server.died.set()
    async with pool_of(server) as pool:
        with pytest.raises(DependencyLostError, match=f"{server.url}: ConnectError"):
            await pool.wait_ready(0.1)
    server.died.clear()
    server.token = "secret"
    async with pool_of(server) as pool:
        with pytest.raises(ConfigurationError, match="JOBGROUP_TOKEN"):
            await pool.wait_ready(IDLE_SECONDS)


def test_addresses() -> None:
    for given, url in [
        ("10.0.0.1:30000", "http://10.0.0.1:30000"),
        ("http://router:30000/", "http://router:30000"),
        ("https://host/path/v1", "https://host/path"),
        ("[::1]:30000", "http://[::1]:30000"),
    ]:
        assert parse_url(given).url == url
    for given in ("", "http://", "ftp://host", "http://host:port", "host:99999"):
        with pytest.raises(ConfigurationError, match="is not an address"):
            parse_url(given)


@pytest.mark.parametrize(("is_deterministic", "requests"), [(True, [1, 1, 1]), (False, [3])])
async def test_deterministic_engines_get_a_request_for_each_sample(
    make_server: MakeServer, is_deterministic: bool, requests: list[int]
) -> None:
    server = make_server()
    async with pool_of(server, engine_deterministic=is_deterministic) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        params = SamplingParams(max_new_tokens=4)
        completions = await pool.run(lambda own: own.rollouts.generate([1], params, n=3, seed=0))
    assert len(completions) == 3
    assert server.generated == requests


async def test_calls_of_one_conversation_go_to_one_server_while_that_lives(make_server: MakeServer) -> None:
    servers = [make_server() for _ in range(3)]
    async with pool_of(*servers) as pool, pool.engine("t") as url, asyncio.timeout(IDLE_SECONDS):
        await eventually(lambda: len(pool.alive) == 3)
        for server in servers:
            server.generated.clear()
        async with httpx.AsyncClient(headers={"Authorization": "Bearer t"}, trust_env=False) as client:

            async def ask(session: str) -> int:
                body = {"input_ids": [1], "sampling_params": {}}
                reply = await client.post(f"{url}/generate", json=body, headers={ROUTING_KEY: session})
                return reply.status_code

            assert {await ask(session) for session in "abcdef" * 4} == {200}
            counts = [len(server.generated) for server in servers]
            assert sum(counts) == 24
            assert all(count % 4 == 0 for count in counts)
            assert max(counts) < 24, "sessions are spread"
            max(servers, key=lambda server: len(server.generated)).died.set()
            while {await ask(session) for session in "abcdef"} != {200}:
                pass
            refused = await client.post(f"{url}/generate", json={}, headers={"Authorization": "Bearer other"})
            assert refused.status_code == 401


@pytest.mark.parametrize("adapter", [None, "policy"])
async def test_the_adapter_of_a_training_run_is_evaluated_where_there_is_one(
    make_server: MakeServer, adapter: str | None
) -> None:
    server = make_server()
    server.adapter = adapter
    async with pool_of(server) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        await pool.run(lambda own: own.rollouts.generate([1], SamplingParams(max_new_tokens=1), n=2))
        assert [own.adapter for own in pool.servers.values()] == [adapter]
    assert server.adapters[-1] == adapter


async def test_a_completion_that_goes_on_is_decoded_by_the_model_of_the_checkpoint(
    make_server: MakeServer, tmp_path: Path
) -> None:
    # Of equal bytes, one after the other, with other token ids.
    byte_tokenizer(["<a>", "<b>", "<c>"]).save_pretrained(tmp_path / "default")
    byte_tokenizer(["<a>"]).save_pretrained(tmp_path / "checkpoint")
    ids = Tokenizer.from_file(str(tmp_path / "checkpoint" / "tokenizer.json")).encode("8 \N{EURO SIGN}").ids

    def generate(request: dict[str, Any]) -> dict[str, Any]:
        begun = len(request["input_ids"]) - 1
        return generated("\N{REPLACEMENT CHARACTER}", ids[begun:] if begun else ids[:3], "length" if begun else "abort")

    fake = make_server()
    fake.generate = generate
    settings = EvaluationSettings(model_name=str(tmp_path / "default"))
    async with RolloutServer(fake.url, settings, str(tmp_path / "checkpoint"), 300) as server:
        params = SamplingParams(max_new_tokens=len(ids))
        prompt = Prompt(id="q", prompt="", ground_truth="", prompt_ids=[1])
        [answer] = await server.complete(prompt, Kind.GREEDY, [0], params, seed=1)
    assert answer.completion == "8 \N{EURO SIGN}"
