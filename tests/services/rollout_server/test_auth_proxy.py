"""What stands in front of the router when there is a token: it refuses strangers, and changes nothing for others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp

from services.http.server import listen, server_config
from services.rollout_server.auth_proxy import create_app
from tests.services.conftest import RunningService, StartService
from tests.waiting import IDLE_SECONDS, eventually

TOKEN = "a-token"


@dataclass
class Router:
    """A stand-in for the router, behind the proxy."""

    url: str = ""
    proxy: str = ""
    heard: list[str] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: Request) -> Response:
        self.heard.append(request.url.path)
        if request.url.path == "/stream":
            return StreamingResponse(self._pieces(), media_type="text/event-stream")
        if request.url.path == "/generate":
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.left.set()
        told = {
            "method": request.method,
            "path": request.scope["raw_path"].decode(),
            "query": request.url.query,
            "body": (await request.body()).decode(),
            "authorization": request.headers.get("authorization"),
        }
        return JSONResponse(told, status_code=418, headers={"X-Worker": "7"})

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.wait_for(self.go_on.wait(), IDLE_SECONDS)
        yield b"second"


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an application in this process; yield its URL."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(server_config(app, timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await serving


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    router = Router()
    app = Starlette()
    app.add_route("/{path:path}", router.answer, methods=["GET", "POST", "DELETE"])
    async with listening(app) as router.url, listening(create_app(router.url, TOKEN)) as router.proxy:
        yield router


def client(router: Router, token: str | None = TOKEN) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {token}".strip()} if token is not None else None
    return httpx.AsyncClient(base_url=router.proxy, headers=headers, timeout=IDLE_SECONDS, trust_env=False)


async def test_the_router_never_hears_of_strangers(router: Router) -> None:
    routes = (("GET", "/v1/models"), ("GET", "/engine_metrics"), ("POST", "/generate"), ("GET", "/x"))
    for token in (None, "", "another"):
        async with client(router, token) as stranger:
            for method, path in routes:
                assert (await stranger.request(method, path)).status_code == 401
            assert router.heard == []
            assert (await stranger.get("/health")).status_code == 418
            assert router.heard.pop() == "/health"


async def test_what_has_the_token_is_passed_on_whole(router: Router) -> None:
    async with client(router) as friend:
        reply = await friend.post("/workers/a%2Fb%3A?b=c&d=%20", content=b'{"text": "1"}')
    assert reply.status_code == 418
    assert reply.headers["X-Worker"] == "7"
    assert reply.json() == {
        "method": "POST",
        "path": "/workers/a%2Fb%3A",
        "query": "b=c&d=%20",
        "body": '{"text": "1"}',
        "authorization": f"Bearer {TOKEN}",
    }


async def test_a_path_that_cannot_be_passed_on_is_refused(router: Router) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.proxy.rpartition(":")[2]))
    async with asyncio.timeout(IDLE_SECONDS):
        writer.write(
            b"GET /%s HTTP/1.1\r\nHost: proxy\r\nAuthorization: Bearer %s\r\n\r\n" % (b"a" * 70_000, TOKEN.encode())
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()
    assert router.heard == []


async def test_a_stream_comes_piece_by_piece(router: Router) -> None:
    async with client(router) as friend, friend.stream("GET", "/stream") as reply:
        pieces = reply.aiter_raw()
        assert await anext(pieces) == b"first"
        router.go_on.set()
        assert await anext(pieces) == b"second"


async def test_the_router_hears_that_a_client_left(router: Router) -> None:
    async with client(router) as friend:
        request = asyncio.create_task(friend.post("/generate", content=b"{}"))
        await eventually(lambda: "/generate" in router.heard, "the request has come")
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    await asyncio.wait_for(router.left.wait(), IDLE_SECONDS)


async def test_a_router_that_is_not_there_may_be_asked_again() -> None:
    async with listening(create_app("http://127.0.0.1:1", TOKEN)) as url, client(Router(proxy=url)) as friend:
        reply = await friend.get("/workers")
    assert reply.status_code == 503
    assert reply.headers["Retry-After"] == "1"
    assert "the router does not answer" in reply.json()["detail"]


def is_serving(process: psutil.Process) -> bool:
    """Return whether this is a process that serves for a proxy, and not multiprocessing's own helper, and runs."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE and "spawn_main" in " ".join(process.cmdline())
    return False


def children_of(proxy: Any) -> dict[int, psutil.Process]:
    """Return the processes that serve for a proxy with several, by id."""
    return {child.pid: child for child in psutil.Process(proxy.process.pid).children() if is_serving(child)}


@pytest.mark.slow
async def test_processes_share_the_requests_a_lost_one_is_replaced_and_all_end_together(
    router: Router, start_service: StartService
) -> None:
    command = ["services.rollout_server.auth_proxy", "--router", router.url, "--processes", "2"]
    for end in (RunningService.terminate, RunningService.kill):
        proxy = start_service(*command, healthy=False, JOBGROUP_TOKEN=TOKEN)
        router.proxy = proxy.url
        await eventually(lambda: len(children_of(proxy)) == 2, "both run")  # noqa: B023  # called at once
        if end is RunningService.kill:
            lost = min(children_of(proxy).values(), key=lambda child: child.pid)
            lost.kill()
            await eventually(lambda: len(children_of(proxy).keys() - {lost.pid}) == 2, "a new one")  # noqa: B023
        for _ in range(10):
            async with client(router) as friend:  # Each time with a connection of its own.
                assert (await friend.get("/workers")).status_code == 418
        async with client(router, None) as stranger:
            assert (await stranger.get("/workers")).status_code == 401
        children = children_of(proxy).values()
        code = await asyncio.to_thread(end, proxy)
        await eventually(lambda: not any(map(is_serving, children)), "no process outlives the main one")  # noqa: B023
        assert code in (0, None)
