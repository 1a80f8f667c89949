"""Connections refuse other protocols than HTTP/1.1."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

from services.core.settings import Settings
from services.http import connections
from services.http.app import create_service_app
from services.http.server import listen
from tests.waiting import IDLE_SECONDS

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Connection]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """``await connect()``: a connection to a service in this process, as its reader and writer."""

    @asynccontextmanager
    async def nothing(_app: FastAPI) -> AsyncIterator[None]:
        yield

    app = create_service_app("test-service", settings=Settings(), lifespan=nothing)

    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(connections.server_config(app, lifespan="on", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
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
    server.should_exit = True
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


def test_every_service_uses_this_server() -> None:
    root = Path(__file__).parents[3]
    modules = [path for folder in ("services", "trainer") for path in (root / folder).rglob("*.py")]
    assert [path.name for path in modules if "uvicorn.Config(" in path.read_text()] == ["connections.py"]
