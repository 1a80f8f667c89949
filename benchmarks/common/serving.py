"""A service in a process of its own, a load generator's client for it, and what was measured."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import psutil

START_SECONDS = 120.0


@dataclass(frozen=True)
class Result:
    """One measurement, and what it should at least or at most be."""

    service: str
    what: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = True

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


class Service:
    """A running service."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    def memory_mb(self) -> float:
        """Resident memory of the process and its children; pages that they share count once a process."""
        return sum(p.memory_info().rss for p in self._processes()) / 1e6

    def _processes(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


@contextmanager
def running(name: str, **environment: str) -> Iterator[tuple[Service, float]]:
    """Starts ``python -m services.<name>``; gives the service and the seconds until it was healthy; ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", f"services.{name}", "--host", "127.0.0.1", "--port", str(port)],
        env={**os.environ, "LOG_LEVEL": "warning", **environment},
    )
    try:
        while not _is_healthy(port):
            if process.poll() is not None or time.monotonic() - started > START_SECONDS:
                raise RuntimeError(f"services.{name} did not become healthy; its output is above")
            time.sleep(0.02)
        yield Service(process, port), time.monotonic() - started
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def _is_healthy(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return b" 200 " in connection.recv(64)
    except OSError:
        return False


class Connection:
    """A bare HTTP/1.1 client over one connection: what a load generator needs, at little cost to the machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        """Connects."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**26))

    async def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The body of the reply; RuntimeError for anything but 200."""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._writer.write(head.encode() + b"\r\n" + body)
        status_and_headers = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(status_and_headers.split(b"content-length:")[1].split(b"\r\n")[0])
        reply = await self._reader.readexactly(length)
        if b" 200 " not in status_and_headers[:20]:
            raise RuntimeError(f"{method} {path}: {reply[:300].decode()}")
        return reply

    def close(self) -> None:
        """Disconnects."""
        self._writer.close()


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, q in 0 to 100."""
    return float(np.percentile(np.asarray(values), q))
