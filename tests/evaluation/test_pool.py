"""The pool of servers: work moves away from dead servers, returns to revived ones, and is bounded at each."""

# The tests wait for plain attributes.
# ruff: noqa: ASYNC110

import asyncio
import contextlib
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from tokenizers import Tokenizer

from evaluation import pool as pool_module
from evaluation import server as inference
from evaluation.pool import ServerPool
from evaluation.samples import Kind
from evaluation.server import RolloutServer, parse_url
from evaluation.settings import EvaluationSettings
from services.clients.rollout import ROUTING_KEY, SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.protocol.prompts import Prompt
from tests.fake_service import fake_service
from tests.ports import free_port
from tests.toy_models import byte_tokenizer
from tests.waiting import IDLE_SECONDS


class FakeServer:
    """A server that answers /health, /work and /generate, and can be killed and started again on its port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.served = 0
        self.at_once = 0
        self.most_at_once = 0
        self.seconds = 0.02
        self.health = 200
        self.token: str | None = None
        self.generated: list[int] = []
        self.adapter: str | None = None
        self.adapters: list[str | None] = []
        self._running: tuple[uvicorn.Server, asyncio.Task[None]] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=self.health)

        @app.get("/v1/models")
        async def models() -> Response:
            return Response(status_code=401 if self.token else 200)

        @app.get("/work")
        async def work() -> dict[str, str]:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                await asyncio.sleep(self.seconds)
            finally:
                self.at_once -= 1
            self.served += 1
            return {"url": self.url}

        @app.post("/generate")
        async def generate(request: Request) -> list[dict[str, Any]]:
            body = await request.json()
            if body.get("lora_path") not in (None, self.adapter):
                raise HTTPException(400, "not loaded")
            n = body["sampling_params"].get("n", 1)
            self.generated.append(n)
            self.adapters.append(body.get("lora_path"))
            meta = {
                "output_token_logprobs": [[-0.1, 7, None]],
                "weight_version": "1",
                "finish_reason": {"type": "stop"},
            }
            return [{"text": "7", "meta_info": meta}] * n

        config = uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        self._running = (server, task)

    async def kill(self) -> None:
        if self._running is None:
            return
        server, task = self._running
        server.should_exit = server.force_exit = True
        for one in server.servers:
            one.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await task
        self._running = None


@pytest.fixture
async def make_server():
    made = []

    async def make():
        made.append(FakeServer())
        await made[-1].start()
        return made[-1]

    yield make
    for server in made:
        await server.kill()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pool_module, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(inference, "PROMPT_SECONDS", IDLE_SECONDS)


def pool_of(*urls, places=4, discover=None, **settings):
    given = EvaluationSettings(eval_concurrency=places, **settings)
    return ServerPool(urls, lambda url: RolloutServer(url, given, "model", 17), places=places, discover=discover)


async def work(server):
    response = await server.client.send_once("GET", "/work", seconds=IDLE_SECONDS)
    return response.json()["url"]


async def test_work_goes_to_all_servers_within_their_places(make_server):
    first, second = await make_server(), await make_server()
    async with pool_of(first.url, second.url) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        done = Counter(await asyncio.gather(*(pool.run(work) for _ in range(60))))
    assert sum(done.values()) == 60
    assert min(done[first.url], done[second.url]) >= 20
    assert max(first.most_at_once, second.most_at_once) <= 4
    assert (pool.deaths, pool.moved) == (0, 0)


async def test_a_dead_servers_work_is_done_elsewhere(make_server):
    first, second = await make_server(), await make_server()
    first.seconds = 30  # holds its work until it dies
    async with pool_of(first.url, second.url) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        everything = [asyncio.create_task(pool.run(work)) for _ in range(20)]
        while first.at_once < 4:
            await asyncio.sleep(0.01)
        await first.kill()
        async with asyncio.timeout(IDLE_SECONDS):
            done = Counter(await asyncio.gather(*everything))
    assert done == {second.url: 20}
    assert pool.deaths == 1
    assert pool.moved >= 4


async def test_a_server_that_comes_back_gets_work_again(make_server):
    server = await make_server()
    async with pool_of(server.url) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        await server.kill()
        waiting = asyncio.create_task(pool.run(work))
        while pool.alive:
            await asyncio.sleep(0.01)
        await server.start()
        async with asyncio.timeout(IDLE_SECONDS):
            assert await waiting == server.url


async def test_a_server_that_hangs_is_given_up(make_server, monkeypatch):
    monkeypatch.setattr(pool_module, "SILENT_SECONDS", 0.3)
    first, second = await make_server(), await make_server()
    first.seconds = 30
    async with pool_of(first.url, second.url, places=1) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        everything = [asyncio.create_task(pool.run(work)) for _ in range(4)]
        while not first.at_once:
            await asyncio.sleep(0.01)
        first.health = 503
        async with asyncio.timeout(IDLE_SECONDS):
            assert set(await asyncio.gather(*everything)) == {second.url}


async def test_without_any_server_work_fails_after_its_patience(make_server, monkeypatch):
    monkeypatch.setattr(pool_module, "LOST_SECONDS", 0.3)
    server = await make_server()
    async with pool_of(server.url) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        await server.kill()
        with pytest.raises(DependencyLostError, match=server.url):
            async with asyncio.timeout(IDLE_SECONDS):
                await asyncio.gather(*(pool.run(work) for _ in range(20)))


async def test_work_that_living_servers_lose_is_not_tried_for_ever(make_server):
    server = await make_server()
    tries = 0

    async def lose(_server):
        nonlocal tries
        tries += 1
        raise DependencyLostError("poison")

    async with pool_of(server.url) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        with pytest.raises(DependencyLostError, match="poison"):
            await pool.run(lose)
        assert await pool.run(work) == server.url
    assert tries == pool_module.MAX_TRIES


async def test_cancelling_ends_the_work_and_frees_the_place(make_server):
    server = await make_server()
    server.seconds = 30
    async with pool_of(server.url, places=1) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        long = asyncio.create_task(pool.run(work))
        while not server.at_once:
            await asyncio.sleep(0.01)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        server.seconds = 0.01
        async with asyncio.timeout(IDLE_SECONDS):
            assert await pool.run(work) == server.url


async def test_cancelling_ends_work_whose_server_is_found_dead_at_the_same_time(make_server, monkeypatch):
    monkeypatch.setattr(pool_module, "SILENT_SECONDS", 0.3)
    server = await make_server()
    server.seconds = 30
    ended = asyncio.Event()

    async def slow_to_end(at):
        try:
            return await work(at)
        except asyncio.CancelledError:
            ended.set()
            await asyncio.sleep(0)
            raise

    async with pool_of(server.url) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        job = asyncio.create_task(pool.run(slow_to_end))
        while not server.at_once:
            await asyncio.sleep(0.01)
        server.health = 503
        async with asyncio.timeout(IDLE_SECONDS):
            await ended.wait()
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job


class Stuck(RolloutServer):
    """A server that never answers a first prompt."""

    async def admit(self):
        await asyncio.Event().wait()


async def test_a_server_that_never_takes_a_prompt_keeps_no_other_from_work(make_server, monkeypatch):
    monkeypatch.setattr(pool_module, "ADMISSION_SECONDS", 0.2)
    stuck, good = await make_server(), await make_server()
    settings = EvaluationSettings()
    kinds = {stuck.url: Stuck, good.url: RolloutServer}
    pool = ServerPool([stuck.url, good.url], lambda url: kinds[url](url, settings, "model", 17), places=4)
    async with pool, asyncio.timeout(IDLE_SECONDS):
        await pool.wait_ready(IDLE_SECONDS)
        assert {await pool.run(work) for _ in range(8)} == {good.url}
        while "a first prompt takes more than 0.2 s" not in pool.servers[stuck.url].problem:
            await asyncio.sleep(0.01)


async def test_discovery_adds_servers_and_drops_dead_ones(make_server, monkeypatch):
    monkeypatch.setattr(pool_module, "DISCOVER_SECONDS", 0.05)
    first, second = await make_server(), await make_server()
    found = [first.url]

    async def discover():
        if found is None:
            raise DependencyLostError("the API server is away")
        return list(found)

    async with pool_of(discover=discover) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        found.append(second.url)
        async with asyncio.timeout(IDLE_SECONDS):
            while len(pool.alive) < 2:
                await asyncio.sleep(0.01)
            found.remove(first.url)
            await first.kill()
            while first.url in pool.servers:
                await asyncio.sleep(0.01)
        assert await pool.run(work) == second.url


async def test_the_error_without_a_reachable_server_names_the_tried_ones():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with pool_of(url) as pool:
            with pytest.raises(DependencyLostError, match=f"{url}: ConnectError"):
                await pool.wait_ready(0.5)


async def test_a_refused_token_is_an_error_of_configuration(make_server):
    server = await make_server()
    server.token = "secret"
    async with pool_of(server.url) as pool:
        with pytest.raises(ConfigurationError, match="JOBGROUP_TOKEN"):
            await pool.wait_ready(IDLE_SECONDS)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("10.0.0.1:30000", "http://10.0.0.1:30000"),
        ("http://router:30000/", "http://router:30000"),
        ("https://host/path/v1", "https://host/path"),
        ("[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_addresses(given, url):
    assert parse_url(given).url == url


@pytest.mark.parametrize("given", ["", "http://", "ftp://host", "http://host:port", "host:99999"])
def test_an_invalid_address_is_refused(given):
    with pytest.raises(ConfigurationError, match="is not an address"):
        parse_url(given)


@pytest.mark.parametrize(("is_deterministic", "requests"), [(True, [1, 1, 1]), (False, [3])])
async def test_deterministic_engines_get_a_request_for_each_sample(make_server, is_deterministic, requests):
    server = await make_server()
    async with pool_of(server.url, engine_deterministic=is_deterministic) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        params = SamplingParams(max_new_tokens=4)
        completions = await pool.run(lambda own: own.rollouts.generate([1], params, n=3, seed=0))
    assert len(completions) == 3
    assert server.generated == requests


async def test_calls_of_one_conversation_go_to_one_server_while_that_lives(make_server):
    servers = [await make_server() for _ in range(3)]
    async with pool_of(*(server.url for server in servers)) as pool, pool.engine("t") as url:
        await pool.wait_ready(IDLE_SECONDS)
        while len(pool.alive) < 3:
            await asyncio.sleep(0.01)
        for server in servers:
            server.generated.clear()
        async with httpx.AsyncClient(headers={"Authorization": "Bearer t"}, timeout=IDLE_SECONDS) as client:

            async def ask(session):
                body = {"input_ids": [1], "sampling_params": {}}
                return await client.post(f"{url}/generate", json=body, headers={ROUTING_KEY: session})

            replies = [await ask(session) for session in ("a", "b", "c", "d", "e", "f") * 4]
            assert {reply.status_code for reply in replies} == {200}
            counts = [len(server.generated) for server in servers]
            assert sum(counts) == 24
            assert all(count % 4 == 0 for count in counts)
            assert max(counts) < 24, "sessions are spread"
            [home] = [server for server in servers if len(server.generated) == max(counts)][:1]
            await home.kill()
            async with asyncio.timeout(IDLE_SECONDS):
                while {(await ask(session)).status_code for session in "abcdef"} != {200}:
                    pass
            refused = await client.post(f"{url}/generate", json={}, headers={"Authorization": "Bearer other"})
            assert refused.status_code == 401


@pytest.mark.parametrize("adapter", [None, "policy"])
async def test_the_adapter_of_a_training_run_is_evaluated_where_there_is_one(make_server, adapter):
    server = await make_server()
    server.adapter = adapter
    async with pool_of(server.url) as pool:
        await pool.wait_ready(IDLE_SECONDS)
        await pool.run(lambda own: own.rollouts.generate([1], SamplingParams(max_new_tokens=1), n=2))
        assert [own.adapter for own in pool.servers.values()] == [adapter]
    assert server.adapters[-1] == adapter


async def test_a_completion_that_goes_on_is_decoded_by_the_model_of_the_checkpoint(tmp_path: Path) -> None:
    # Of equal bytes, one after the other, with other token ids.
    byte_tokenizer(["<a>", "<b>", "<c>"]).save_pretrained(tmp_path / "default")
    byte_tokenizer(["<a>"]).save_pretrained(tmp_path / "checkpoint")
    ids = Tokenizer.from_file(str(tmp_path / "checkpoint" / "tokenizer.json")).encode("8 \N{EURO SIGN}").ids

    def generate(request: Any) -> Any:
        begun = len(request["input_ids"]) - 1
        tokens, reason = (ids[begun:], "length") if begun else (ids[:3], "abort")
        logprobs = [[-0.5, token, None] for token in tokens]
        meta = {"output_token_logprobs": logprobs, "weight_version": "1", "finish_reason": {"type": reason}}
        return {"text": "\N{REPLACEMENT CHARACTER}", "meta_info": meta}

    settings = EvaluationSettings(model_name=str(tmp_path / "default"))
    with fake_service({"POST /generate": generate}) as service:
        async with RolloutServer(service.endpoint.url, settings, str(tmp_path / "checkpoint"), 300) as server:
            params = SamplingParams(max_new_tokens=len(ids))
            prompt = Prompt(id="q", prompt="", ground_truth="", prompt_ids=[1])
            [answer] = await server.complete(prompt, Kind.GREEDY, [0], params, seed=1)
    assert answer.completion == "8 \N{EURO SIGN}"
