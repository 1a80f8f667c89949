"""Kept-alive HTTP/1.1 connections to one address, which take a tenth of a general client's time for a request."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from typing import cast

import httptools

from services.core.endpoints import Endpoint
from services.http.client import CONNECT_SECONDS, KEEP_ALIVE_SECONDS, watched_socket


class Connections:
    """Connections to an address, used within one event loop. Each new connection resolves the name anew."""

    def __init__(self, address: Endpoint, headers: Mapping[str, str]) -> None:
        """Make connections whose requests all have ``headers``."""
        self._address = address
        host = address.url.removeprefix("http://")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in {"Host": host, **headers}.items())
        self._idle: list[_Connection] = []

    async def post(self, path: str, headers: Mapping[str, str], body: bytes, seconds: float) -> tuple[int, bytes]:
        """Send a request and return the status and the body of its answer.

        Raises:
            OSError: the connection cannot be made or was lost, or there is no answer within ``seconds`` (TimeoutError).
        """
        given = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {path} HTTP/1.1\r\n{self._headers}{given}Content-Length: {len(body)}\r\n\r\n"
        async with asyncio.timeout(seconds):
            connection = self._take_idle() or await self._connect(min(CONNECT_SECONDS, seconds))
            try:
                answer = await connection.ask(head.encode() + body)
            except BaseException:
                connection.close()
                raise
        if connection.is_open:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close the connections that are idle."""
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> _Connection | None:
        """Return the connection that was used last, if it is open and was used lately."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.used < KEEP_ALIVE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connect(self, seconds: float) -> _Connection:
        """Return a new connection to the first of the name's addresses that accepts one."""
        loop = asyncio.get_running_loop()
        failure: OSError | None = None
        async with asyncio.timeout(seconds):
            found = await loop.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM)
            for address in found:
                made = watched_socket(address)
                try:
                    made.setblocking(False)
                    await loop.sock_connect(made, address[4])
                    _, connection = await loop.create_connection(_Connection, sock=made)
                    return connection
                except OSError as error:
                    failure = error
                    made.close()
                except BaseException:
                    made.close()
                    raise
        raise failure or OSError(f"{self._address.host} has no address")


class _Connection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.used = time.monotonic()
        """The time of the newest answer."""
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and return the status and the body of its answer; raises OSError if the connection is lost."""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Close the connection, whatever was sent."""
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass.
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if self._answer is None or self._answer.done():
            self.close()  # Nothing was asked, so this is no answer.
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lose(ConnectionError(f"the answer is not HTTP: {error}"))

    def eof_received(self) -> None:
        """Close the connection, which the other side has closed."""
        self._lose(ConnectionError("the connection was closed before the whole answer had arrived"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request that waits for its answer."""
        self._lose(exc if isinstance(exc, OSError) else ConnectionError("the connection was lost"))

    def on_body(self, body: bytes) -> None:
        """Keep a part of the answer's body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Give the answer to whoever waits for it."""
        status, body = self._parser.get_status_code(), bytes(self._body)
        self._body.clear()
        if status < 200:
            return  # The answer comes after this one.
        self.used = time.monotonic()
        if not self._parser.should_keep_alive():
            self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((status, body))

    def _lose(self, error: OSError) -> None:
        self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
