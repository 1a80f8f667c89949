from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from pydantic import BaseModel
from structlog.testing import capture_logs

from services.core.errors import DependencyLostError
from services.http.client import HttpClient, RequestRefusedError
from tests.waiting import IDLE_SECONDS, LoopClock


class Answer(BaseModel):
    answer: int


@dataclass
class Script:
    """A server that answers as it is told: (status, headers, body), or None to hang up, or a wait in seconds."""

    replies: list[tuple[int, str, str] | float | None]
    requests: list[bytes] = field(default_factory=list)
    port: int = 0
    when_asked: Callable[[], object] = lambda: None

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.requests.append(head)
                self.when_asked()
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        await reader.readexactly(int(line.split(b":")[1]))
                reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
                if reply is None:
                    return
                if isinstance(reply, float):
                    await asyncio.sleep(reply)
                    continue
                status, headers, body = reply
                writer.write(
                    f"HTTP/1.1 {status} x\r\n{headers}Content-Length: {len(body)}\r\n\r\n{body}".encode("latin-1")
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def listening(script: Script, port: int = 0) -> AsyncIterator[Script]:
    server = await asyncio.start_server(script.handle, "127.0.0.1", port)
    script.port = server.sockets[0].getsockname()[1]
    try:
        yield script
    finally:
        server.close()


@pytest.fixture(autouse=True)
def connections_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives connections the time of a busy machine to open, and to be used again."""
    monkeypatch.setattr("services.http.client.CONNECT_SECONDS", IDLE_SECONDS)
    monkeypatch.setattr("services.http.client.KEEP_ALIVE_SECONDS", IDLE_SECONDS)


GOOD = (200, "", '{"answer": 42}')
Retries = Callable[[], float]


@pytest.fixture
def retries() -> Retries:
    def count() -> float:
        return REGISTRY.get_sample_value("client_retries_total", {"service": "oracle"}) or 0.0

    before = count()
    return lambda: count() - before


def client(script: Script, **options: float) -> HttpClient:
    return HttpClient(f"http://127.0.0.1:{script.port}", service="oracle", **options)


@pytest.mark.parametrize(
    "trouble",
    [(503, "", ""), (502, "", ""), (429, "Retry-After: 0\r\n", ""), None, 60.0],
    ids=["503", "502", "429", "hang-up", "silence"],
)
async def test_what_may_pass_is_tried_again_and_counted(
    trouble: tuple[int, str, str] | float | None, retries: Retries
) -> None:
    # Where an answer comes, it may take its time.
    seconds = 1.0 if isinstance(trouble, float) else IDLE_SECONDS
    with capture_logs() as logs:
        async with listening(Script([trouble, trouble, GOOD])) as script, client(script, timeout=seconds) as http:
            assert (await http.call("POST", "/ask", Answer, {"a": 1})).answer == 42
    assert [line["request"] for line in logs] == [f"POST http://127.0.0.1:{script.port}/ask"], "one line"
    asked = len(script.requests)
    # On a busy machine a good answer may be late as well.
    assert asked >= 3 if isinstance(trouble, float) else asked == 3
    assert retries() >= asked - 1 if isinstance(trouble, float) else retries() == 2


async def test_a_refusal_is_final_and_says_what_the_service_said(retries: Retries) -> None:
    problem = '{"title": "no", "status": 422, "detail": "body.x: too small"}'
    async with listening(Script([(422, "", problem)])) as script, client(script) as http:
        with pytest.raises(RequestRefusedError, match=r"oracle refused .*/ask: 422 body.x: too small") as refusal:
            await http.call("POST", "/ask", Answer, {})
    assert refusal.value.status == 422
    assert len(script.requests) == 1
    assert retries() == 0


async def test_the_deadline_bounds_all_attempts_and_the_error_names_service_address_and_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = LoopClock(monkeypatch, asyncio.get_running_loop())
    async with listening(Script([(503, "", '{"detail": "loading"}')])) as script, client(script) as http:
        # At the third attempt the call's deadline has passed, and the client's has not.
        script.when_asked = lambda: clock.pass_by(len(script.requests) // 3 * 61)
        assert http.deadline > 61
        with pytest.raises(
            DependencyLostError, match=rf"oracle did not answer GET http://127.0.0.1:{script.port}/ask .*503 loading"
        ):
            await http.call("GET", "/ask", Answer, deadline=60)
    assert len(script.requests) == 3


async def test_a_reply_that_is_too_long_is_not_read_and_a_packed_one_is() -> None:
    async with listening(Script([(200, "", "x" * 1001)])) as script, client(script, max_reply_bytes=1000) as http:
        with pytest.raises(
            DependencyLostError, match=rf"oracle answered .*:{script.port}/ask with more than the 1000 b"
        ):
            await http.call("GET", "/ask", Answer)
        with pytest.raises(DependencyLostError, match="1000 bytes"):
            await http.send_once("GET", "/ask", seconds=IDLE_SECONDS)
    assert len(script.requests) == 2
    packed = gzip.compress(b"x" * 1001).decode("latin-1")
    async with listening(Script([(200, "Content-Encoding: gzip\r\n", packed)])) as script:
        async with client(script, max_reply_bytes=1001) as http:
            assert (await http.request("GET", "/ask")).text == "x" * 1001
        async with client(script, max_reply_bytes=1000) as http:
            with pytest.raises(DependencyLostError, match="1000 bytes"):
                await http.request("GET", "/ask")


async def test_a_silent_connection_is_given_up() -> None:
    async with listening(Script([GOOD])) as script, client(script) as http:
        response = await http.request("GET", "/ask")
        connection = response.extensions["network_stream"].get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        probes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert probes * connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) < 30


async def test_another_program_at_the_address_is_recognised() -> None:
    async with listening(Script([(200, "", '{"hello": 1}')])) as script, client(script) as http:
        with pytest.raises(DependencyLostError, match=r"something other than a Answer \(answer: Field required\)"):
            await http.call("GET", "/ask", Answer)


async def test_a_service_that_restarts_is_found_again_by_the_same_client(retries: Retries) -> None:
    first, second = Script([GOOD]), Script([(200, "", '{"answer": 43}')])
    async with AsyncExitStack() as stack:
        async with listening(first):
            http = await stack.enter_async_context(client(first))
            assert (await http.call("GET", "/ask", Answer)).answer == 42
        # The pooled connection is still open, to a server that answers no more.
        first.replies = [None]
        await stack.enter_async_context(listening(second, first.port))
        assert (await http.call("GET", "/ask", Answer)).answer == 43
    assert retries() == 1


async def test_waiting_for_health_ends_when_healthy_or_at_the_deadline_with_the_last_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.http.client.PROBE_SECONDS", IDLE_SECONDS)
    async with listening(Script([(503, "", '{"status": "starting"}'), None, GOOD])) as script, client(script) as http:
        await http.wait_healthy(IDLE_SECONDS)
    clock = SimpleNamespace(monotonic=lambda: len(script.requests) * IDLE_SECONDS / 2)
    monkeypatch.setattr("services.http.client.time", clock)
    monkeypatch.setattr("services.http.client.LONGEST_HEALTH_POLL_SECONDS", 0.1)
    async with listening(Script([(503, "", '{"status": "starting"}')])) as script, client(script) as http:
        with pytest.raises(DependencyLostError, match=r"not healthy after 120 s: /health answered 503 .*starting"):
            await http.wait_healthy(IDLE_SECONDS)
    assert len(script.requests) == 2


async def test_a_service_that_fails_is_a_lost_dependency(retries: Retries) -> None:
    async with listening(Script([(500, "", '{"detail": "KeyError in oracle"}')])) as script, client(script) as http:
        with pytest.raises(DependencyLostError, match="500 KeyError in oracle"):
            await http.call("GET", "/ask", Answer)
    assert retries() == 0


async def test_each_connection_resolves_the_name_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[str] = []
    loop = asyncio.get_running_loop()
    original = loop.getaddrinfo
    async with listening(Script([None, GOOD])) as script:

        async def resolve(host: str | bytes | None, *args: object, **options: object) -> object:
            resolved.append(host.decode() if isinstance(host, bytes) else str(host))
            return await original("127.0.0.1", *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        async with HttpClient(f"http://oracle-0.group:{script.port}", service="oracle") as http:
            assert (await http.call("GET", "/ask", Answer)).answer == 42
    assert resolved == ["oracle-0.group", "oracle-0.group"]
