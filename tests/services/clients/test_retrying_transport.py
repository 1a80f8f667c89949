"""The transport of agents' clients: it waits for a gateway that is away, and gives whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from services.clients import agent_episodes
from services.clients.agent_episodes import RetryingTransport
from services.core.tasks import Stopwatch
from services.protocol.sessions import REQUEST_MARK
from tests.waiting import IDLE_SECONDS

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole"
HALF = WHOLE[:-2]
AWAY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\naway"
LIMIT = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 5\r\n\r\nlimit"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_episodes, "FIRST_PAUSE_SECONDS", 0.01)


@asynccontextmanager
async def server(replies: list[bytes], port: int = 0, marks: list[str] | None = None) -> AsyncIterator[int]:
    """Answer each request with the next of ``replies``, and close its connection; add the requests' ``marks``."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if marks is not None:
            marks.append(head.decode().split(f"{REQUEST_MARK}: ")[1].split("\r\n")[0])
        await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
        writer.write(replies.pop(0))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port) as listening:
        yield listening.sockets[0].getsockname()[1]


async def ask(port: int, seconds: float = 60) -> tuple[int, str]:
    transport = RetryingTransport(seconds, Stopwatch())
    async with httpx.AsyncClient(transport=transport, timeout=IDLE_SECONDS) as client:
        reply = await client.post(f"http://127.0.0.1:{port}/", json={})
    return reply.status_code, reply.text


async def test_the_attempts_of_a_request_have_one_mark_and_equal_requests_have_others() -> None:
    marks: list[str] = []
    async with server([AWAY, HALF, WHOLE, WHOLE], marks=marks) as port:
        assert [await ask(port), await ask(port)] == [(200, "whole")] * 2
    first, other = marks[0], marks[3]
    assert marks == [first, first, first, other]
    assert first != other


async def test_a_refusal_is_an_answer() -> None:
    replies = [LIMIT, WHOLE]
    async with server(replies) as port:
        assert await ask(port) == (429, "limit")
    assert replies == [WHOLE]


@pytest.mark.parametrize(("replies", "outcome"), [([AWAY] * 9, 503), ([b""] * 9, httpx.RemoteProtocolError)])
async def test_after_its_time_the_last_outcome_counts(replies: list[bytes], outcome: int | type[Exception]) -> None:
    async with server(replies) as port:
        if isinstance(outcome, int):
            assert (await ask(port, seconds=0.02))[0] == outcome
        else:
            with pytest.raises(outcome):
                await ask(port, seconds=0.02)
    assert len(replies) < 9
