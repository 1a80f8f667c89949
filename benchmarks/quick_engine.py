"""An engine that costs nearly nothing: ``python -m benchmarks.quick_engine PORT SECONDS REPLIES``.

It answers each POST ``SECONDS`` after its last byte with one of the bodies in the file ``REPLIES`` (a JSON array of
texts), chosen by a checksum of the request. It reads no JSON.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import orjson
import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Answering(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self, replies: Sequence[bytes], seconds: float) -> None:
        self._replies = replies
        self._seconds = seconds
        self._received = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        """Answer once the body is complete."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0):
            return
        self._received = b""
        reply = self._replies[zlib.crc32(body) % len(self._replies)]
        asyncio.get_running_loop().call_later(self._seconds, self._answer, reply)

    def _answer(self, reply: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(reply)


async def serve(port: int, seconds: float, bodies: Sequence[str]) -> None:
    """Answer requests until the process ends."""
    replies = [_HEAD % len(body.encode()) + body.encode() for body in bodies]
    server = await asyncio.get_running_loop().create_server(partial(Answering, replies, seconds), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    port, seconds, file = sys.argv[1:]
    uvloop.run(serve(int(port), float(seconds), orjson.loads(Path(file).read_bytes())))
