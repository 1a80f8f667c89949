"""Engines that cost nearly nothing: ``python -m benchmarks.quick_engine ENGINES SECONDS REPLIES``.

It prints the ports on which its ENGINES listen. An engine answers a POST /generate ``SECONDS`` after its last byte with
one of the bodies in the file ``REPLIES`` (a JSON array of texts in the model's directory), chosen by a checksum of the
request. It takes LOAD_SECONDS to load a policy version. It answers every other request at once, with what a router or a
trainer asks for.
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

LOAD_SECONDS = 1.0


class Engine:
    """The state of an engine."""

    def __init__(self, model: str, seconds: float, replies: Sequence[bytes]) -> None:
        self.model = model
        self.seconds = seconds
        self.replies = replies
        self.version = "0"

    def state(self) -> bytes:
        """Return the reply to everything but /generate."""
        facts = {"success": True, "weight_version": self.version, "model_path": self.model, "is_generation": True}
        return whole(orjson.dumps(facts | {"tp_size": 1, "dp_size": 1}))


class Answering(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
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
        engine, later = self._engine, asyncio.get_running_loop().call_later
        path = head.split(b" ", 2)[1]
        if path == b"/generate":
            later(engine.seconds, self._answer, engine.replies[zlib.crc32(body) % len(engine.replies)])
        elif path == b"/update_weights_from_disk":
            later(LOAD_SECONDS, self._load, orjson.loads(body)["weight_version"])
        else:
            self._answer(engine.state())

    def _load(self, version: str) -> None:
        self._engine.version = version
        self._answer(self._engine.state())

    def _answer(self, reply: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(reply)


def whole(body: bytes) -> bytes:
    """Return a body with the head of its reply."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def serve(engines: int, seconds: float, model: str, replies: Sequence[bytes]) -> None:
    """Answer requests until the process ends."""
    loop, ports = asyncio.get_running_loop(), []
    for _ in range(engines):
        connection = partial(Answering, Engine(model, seconds, replies))
        server = await loop.create_server(connection, "127.0.0.1", 0, backlog=1024)
        ports.append(server.sockets[0].getsockname()[1])
    print(*ports, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    engines, seconds, file = sys.argv[1:]
    bodies = [whole(body.encode()) for body in orjson.loads(Path(file).read_bytes())]
    uvloop.run(serve(int(engines), float(seconds), str(Path(file).parent), bodies))
