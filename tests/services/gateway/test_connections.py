"""The engine client's connections, against a server that answers byte by byte as each test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.core.endpoints import Endpoint
from services.gateway.connections import Connections

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Sends the next of ``answers`` for each request, and counts connections; an empty answer closes the connection."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                if not (answer := self.answers.pop(0)):
                    break
                for byte in answer:
                    writer.write(bytes([byte]))
                    await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Connections]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    connections = Connections(Endpoint("127.0.0.1", listening.sockets[0].getsockname()[1]), {"X-Always": "yes"})
    yield connections
    connections.close()
    listening.close()


async def post(connections: Connections, seconds: float = 30.0) -> tuple[int, bytes]:
    return await connections.post("/generate", {"X-Key": "k"}, b"{}", seconds)


async def test_a_connection_is_used_again_and_every_request_is_whole() -> None:
    chunked = b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"
    server = Server(ANSWER, b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER, chunked, ANSWER)
    async with connected(server) as connections:
        assert [await post(connections) for _ in range(4)] == [(200, b"ok"), (200, b"ok"), (503, b"abcd"), (200, b"ok")]
    assert server.connections == 1
    for request in server.requests:
        head, _, body = request.partition(b"\r\n\r\n")
        assert body == b"{}"
        assert {b"POST /generate HTTP/1.1", b"X-Key: k", b"X-Always: yes"} < set(head.split(b"\r\n"))


async def test_requests_at_once_have_connections_of_their_own() -> None:
    server = Server(*[ANSWER] * 4)
    async with connected(server) as connections:
        assert await asyncio.gather(*(post(connections) for _ in range(4))) == [(200, b"ok")] * 4
    assert server.connections == 4


async def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    server = Server(ANSWER.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"), ANSWER)
    async with connected(server) as connections:
        assert [await post(connections) for _ in range(2)] == [(200, b"ok")] * 2
    assert server.connections == 2


@pytest.mark.parametrize("answer", [b"", ANSWER[:-1], b"SSH-2.0-OpenSSH\r\n"], ids=["none", "half", "not HTTP"])
async def test_an_answer_that_is_none_is_an_error_and_the_next_request_connects_anew(answer: bytes) -> None:
    server = Server(answer)  # which closes the connection after its last answer
    async with connected(server) as connections:
        with pytest.raises(ConnectionError):
            await post(connections)
        server.answers = [ANSWER]
        assert await post(connections) == (200, b"ok")
    assert server.connections == 2


async def test_a_silent_server_is_given_up_in_time() -> None:
    server = Server(b"HTTP/1.1 200 OK\r\n", ANSWER)
    async with connected(server) as connections:
        with pytest.raises(TimeoutError):
            await post(connections, 0.05)


async def test_no_server_is_a_connection_error(unused_tcp_port: int) -> None:
    with pytest.raises(ConnectionError):
        await post(Connections(Endpoint("127.0.0.1", unused_tcp_port), {}))
