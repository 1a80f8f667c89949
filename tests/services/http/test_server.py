"""Connections refuse other protocols than HTTP/1.1, and close when no whole request comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvicorn
import websockets
from fastapi import FastAPI, Request, WebSocket

from services.core.settings import Settings
from services.http import server
from services.http.app import create_service_app
from services.http.server import MAX_HEAD_BYTES, listen, server_config
from tests.waiting import IDLE_SECONDS, LoopClock

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Connection]]

LIMIT_SECONDS = 20.0
"""The limit of a request in the test of what is not closed."""


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """``await connect()``: a connection to a service in this process, as its reader and writer."""

    @asynccontextmanager
    async def nothing(_app: FastAPI) -> AsyncIterator[None]:
        yield

    app = create_service_app("test-service", settings=Settings(), lifespan=nothing)

    @app.get("/late")
    async def late() -> str:
        await asyncio.sleep(1.5 * LIMIT_SECONDS)
        return "late"

    @app.websocket("/echo")
    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(await socket.receive_text())

    @app.post("/count")
    async def count(request: Request) -> int:
        return len(await request.body())

    listener = listen("127.0.0.1", 0)
    running = uvicorn.Server(server_config(app, lifespan="on", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(running.serve(sockets=[listener]))
    writers: list[asyncio.StreamWriter] = []

    async def open_connection() -> Connection:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writers.append(writer)
        return reader, writer

    async with asyncio.timeout(IDLE_SECONDS):
        await app.state.lifecycle.ready.wait()
    yield open_connection
    for writer in writers:
        writer.close()
    running.should_exit = True
    await serving


async def answer(connection: Connection, request: bytes) -> bytes:
    """Return the head of the reply to ``request``."""
    reader, writer = connection
    writer.write(request)
    async with asyncio.timeout(IDLE_SECONDS):
        return await reader.readuntil(b"\r\n\r\n")


async def test_http_2_is_refused_without_a_warning_and_other_protocols_with_one(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert (await answer(await connect(), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0")).startswith(b"HTTP/1.1 400")
        assert "Invalid HTTP" not in caplog.text
        assert (await answer(await connect(), b"\x16\x03\x01\x02\x00\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert "Invalid HTTP" in caplog.text


async def test_connections_without_a_whole_request_are_closed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = [await connect() for _ in range(5)]
    for connection in served:
        assert (await answer(connection, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 200")
    usual = server.REQUEST_SECONDS
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.5)
    silent = [await connect() for _ in range(20)]
    for _, writer in served:
        writer.write(b"GET /health HTTP/1.1\r\n")
    unfinished = [await connect() for _ in range(2)]
    for _, writer in unfinished:
        writer.write(b"POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345")
    endless = [await connect() for _ in range(50)]

    async def send_headers(writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"X-Header: and so on\r\n")
                await writer.drain()
                await asyncio.sleep(0.1)

    senders = [asyncio.create_task(send_headers(writer)) for _, writer in endless]
    async with asyncio.timeout(IDLE_SECONDS):
        for reader, _ in (*silent, *served, *unfinished, *endless):
            with contextlib.suppress(ConnectionError):
                while await reader.read(2**16):
                    pass
    for sender in senders:
        sender.cancel()
    monkeypatch.setattr(server, "REQUEST_SECONDS", usual)
    assert (await answer(await connect(), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 200")


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /count HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
HEADS = {
    "one header": (GET + b"X: ", b"x" * 1000),
    "many headers": (GET, b"X: y\r\n" * 200),
    "a path": (b"GET /", b"x" * 1000),
    "headers behind a body": (POST + b"1\r\nx\r\n0\r\nX: ", b"x" * 1000),
    "an extension of a chunk": (POST + b"1;", b"x" * 1000),
}


@pytest.mark.parametrize("head", HEADS)
async def test_headers_are_bounded_in_bytes(connect: Connect, head: str) -> None:
    begin, more = HEADS[head]
    reader, writer = await connect()
    writer.write(begin)
    received = asyncio.create_task(reader.read(2**16))
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(IDLE_SECONDS):
            while not received.done():
                writer.write(more)
                await writer.drain()
                await asyncio.sleep(0)
        assert (await received)[:12] in (b"", b"HTTP/1.1 431")  # None, if it is on its way when the connection breaks.


async def test_a_large_body_and_long_headers_are_taken(connect: Connect) -> None:
    connection = await connect()
    length = b"Content-Length: %d\r\n" % 2**20
    request = b"POST /count HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 60_000 + b"\r\n" + length + b"\r\n" + bytes(2**20)
    for _ in range(2):
        assert (await answer(connection, request)).startswith(b"HTTP/1.1 200")
        await connection[0].readexactly(7)


async def test_a_late_answer_a_slow_body_and_a_socket_keep_their_connections(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", LIMIT_SECONDS)
    clock = LoopClock(monkeypatch, asyncio.get_running_loop())
    waiting = asyncio.create_task(answer(await connect(), b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n"))
    _, writer = await connect()
    socket = websockets.connect("ws://{}:{}/echo".format(*writer.get_extra_info("peername")), ping_interval=None)
    slow = await connect()
    slow[1].write(b"POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 16\r\n\r\n")
    async with socket as opened:
        for _ in range(15):
            slow[1].write(b"x")
            await asyncio.sleep(0.05)
            clock.pass_by(LIMIT_SECONDS / 10)
        assert (await answer(slow, b"x")).startswith(b"HTTP/1.1 200")
        await opened.send("hello")
        assert await opened.recv() == "hello"
    assert (await waiting).startswith(b"HTTP/1.1 200")


async def test_too_long_headers_are_refused_by_name(connect: Connect) -> None:
    assert (await answer(await connect(), GET.ljust(MAX_HEAD_BYTES + 1, b"x"))).startswith(b"HTTP/1.1 431")
