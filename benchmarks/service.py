"""A service in a process of its own, a client that costs a load generator little, and figures with targets."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import httpx
import numpy as np
import psutil
from rich.table import Table

from benchmarks import harness
from benchmarks.harness import Args, Option, Side

START_SECONDS = 120.0
STDERR = 2
JSON = "application/json"
MISSED = "missed"
NO_FAIL = Option(False, "end with 0 even if a target is missed")


class Figure(NamedTuple):
    """A measured value of a service under a load, and its target if there is one."""

    load: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None


def percentile(load: str, share: int, milliseconds: Sequence[float], at_most: float | None = None) -> Figure:
    """Return a percentile of latencies."""
    return Figure(f"{load}, p{share}", float(np.percentile(milliseconds, share)), "ms", at_most=at_most)


@dataclass(frozen=True)
class Service:
    """A running service."""

    pid: int
    port: int
    start_seconds: float
    """Seconds until it was healthy."""

    def cpu_seconds(self, *, recursive: bool = False) -> float:
        """Return the processor time of the process; ``recursive`` adds that of the processes that it started."""
        root = psutil.Process(self.pid)
        times = [process.cpu_times() for process in (root, *(root.children(recursive=True) if recursive else ()))]
        return float(sum(used.user + used.system for used in times))

    def memory_mb(self) -> float:
        """Return the resident memory of the process and its children; shared pages count once a process."""
        root = psutil.Process(self.pid)
        return sum(process.memory_info().rss for process in (root, *root.children(recursive=True))) / 1e6


@contextmanager
def running(name: str, *flags: str, **environment: str) -> Iterator[Service]:
    """Run ``python -m services.<name>`` with further flags within the context.

    Raises:
        SystemExit: it did not become healthy.
    """
    port = harness.free_port()
    command = [sys.executable, "-m", f"services.{name}", "--host", "127.0.0.1", "--port", str(port), *flags]
    with started(command, port, environment) as service:
        yield service


@contextmanager
def started(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Iterator[Service]:
    """Run a command that serves /health on ``port`` within the context.

    Raises:
        SystemExit: it did not become healthy.
    """
    started = time.monotonic()
    # The router logs to its standard output, where only tables belong.
    process = subprocess.Popen(command, env={**os.environ, "LOG_LEVEL": "warning", **environment}, stdout=STDERR)
    try:
        while not _is_healthy(port):
            if process.poll() is not None or time.monotonic() - started > START_SECONDS:
                raise SystemExit(f"error: {command[2]} did not become healthy; its output is above")
            time.sleep(0.02)
        yield Service(process.pid, port, time.monotonic() - started)
    finally:
        harness.end(process)


def _is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=1, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


class Connection:
    """A bare HTTP/1.1 client over one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        media_type: str = JSON,
        *,
        accept: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the body of the reply.

        Raises:
            RuntimeError: the status is not 200.
        """
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        if body:
            head += f"Content-Type: {media_type}\r\nContent-Length: {len(body)}\r\n"
        self._writer.write(head.encode() + b"\r\n" + body)
        status_and_headers = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(status_and_headers.split(b"content-length:")[1].split(b"\r\n")[0])
        reply = await self._reader.readexactly(length)
        if b" 200 " not in status_and_headers[:20]:
            raise RuntimeError(f"{method} {path}: {reply[:300].decode()}")
        return reply


@asynccontextmanager
async def connect(port: int) -> AsyncIterator[Connection]:
    """Hold a connection within the context."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


async def send_all(
    port: int, connections: int, path: str, bodies: Sequence[bytes], media_type: str = JSON
) -> tuple[float, list[bytes]]:
    """Send POST requests over several connections; return the seconds for all, and the replies in any order."""
    waiting = list(reversed(bodies))
    replies: list[bytes] = []

    async def feed() -> None:
        async with connect(port) as connection:
            while waiting:
                replies.append(await connection.request("POST", path, waiting.pop(), media_type))

    started = time.perf_counter()
    await asyncio.gather(*(feed() for _ in range(connections)))
    return time.perf_counter() - started, replies


def measure_figures(loads: Mapping[str, Callable[[], Iterable[Figure]]], args: Args) -> list[Side]:
    """Measure all rounds of each load; a side is a figure of a load."""
    sides = []
    for name, measure in loads.items():
        rounds = [list(measure()) for _ in range(args.rounds)]
        for figures in zip(*rounds, strict=True):
            measured = [one._asdict() | {"service": name} for one in figures]
            sides.append(Side(f"{name}, {figures[0].load}", lambda _: {}, measured))
        harness.say(f"{name}: done")
    return sides


def target_of(side: Side) -> str:
    """Return a figure's target, and whether the median of the rounds meets it; "" without a target."""
    first, median = side.rounds[0], side.median("value")
    if first["at_least"] is not None:
        return f">= {first['at_least']:g}, {'met' if median >= first['at_least'] else MISSED}"
    if first["at_most"] is not None:
        return f"<= {first['at_most']:g}, {'met' if median <= first['at_most'] else MISSED}"
    return ""


def figure_table(title: str) -> Callable[[Args, Sequence[Side]], list[Table]]:
    """Return a function that makes the table of figures."""
    columns: harness.Columns = {
        "service": lambda side: side.rounds[0]["service"],
        "load": lambda side: side.rounds[0]["load"],
        "median (least to most)": lambda side: side.spread("value", 1),
        "unit": lambda side: side.rounds[0]["unit"],
        "target": target_of,
    }
    return lambda _args, sides: [harness.table(title, sides, columns)]


def has_missed(args: Args, sides: Sequence[Side]) -> int:
    """Return 1 if a target is missed, unless --no-fail is given."""
    return int(not args.no_fail and any(target_of(side).endswith(MISSED) for side in sides))
