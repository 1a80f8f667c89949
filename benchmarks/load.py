"""Loads of services: a service in a process of its own, a client that costs little, and rows of figures."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import orjson
import psutil
import torch

from benchmarks import job
from benchmarks.job import ROOT, say
from local_runner.nodes import free_port
from services.core.machine import cores
from services.core.processes import end_all

START_SECONDS = 120.0
JSON = "application/json"


class Figure(NamedTuple):
    """A measured value."""

    name: str
    value: float
    unit: str


def percentile(name: str, share: int, milliseconds: Sequence[float]) -> Figure:
    """Return a percentile of latencies."""
    return Figure(f"{name}, p{share}", float(np.percentile(milliseconds, share)), "ms")


Loads = Mapping[str, Callable[[], Iterable[Figure]]]
"""Each load's name, and a function that measures it once."""


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Return the command line that every benchmark has."""
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=about, formatter_class=form)
    made.add_argument("--rounds", type=int, default=3, help="how often each load is measured, in turn; default 3")
    made.add_argument("--quick", action="store_true", help="one round, with smaller loads")
    made.add_argument("--only", default="", help="the loads whose names contain this text")
    made.add_argument("--rows", type=Path, help="add the rows to this file, such as docs/benchmarks/NAME.jsonl")
    return made


def measure(loads: Loads, args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure all loads in turn; print a table of the medians with the least and the most, and return the rows."""
    chosen = {name: load for name, load in loads.items() if args.only in name}
    values: dict[tuple[str, str, str], list[float]] = {}
    for number in range(1 if args.quick else args.rounds):
        for name, load in chosen.items():
            for figure in load():
                values.setdefault((name, figure.name, figure.unit), []).append(figure.value)
            say(f"round {number + 1}, {name}: done")
    rows = []
    for (name, figure_name, unit), measured in values.items():
        spread = {"median": statistics.median(measured), "least": min(measured), "most": max(measured)}
        texts = " | ".join(f"{value:.4g}" for value in spread.values())
        print(f"| {name} | {figure_name} | {texts} | {unit} |")
        about = {"date": datetime.now(tz=UTC).date().isoformat(), "machine": machine(), "rounds": len(measured)}
        rows.append({"load": name, "figure": figure_name, **spread, "unit": unit, **about})
    if args.rows:
        with args.rows.open("ab") as file:
            file.writelines(orjson.dumps(row) + b"\n" for row in rows)
    return rows


def machine() -> str:
    """Return a line about this machine."""
    memory = psutil.virtual_memory().total / 2**30
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    kind = f"{platform.system()} {platform.machine()}, {cores()} cores ({torch.backends.cpu.get_cpu_capability()})"
    return f"{kind}, {memory:.0f} GiB{gpu}"


@dataclass(frozen=True)
class Service:
    """A running service."""

    pid: int
    port: int
    start_seconds: float
    """Seconds until it was healthy."""

    def cpu_seconds(self) -> float:
        """Return the processor time of the process."""
        used = psutil.Process(self.pid).cpu_times()
        return float(used.user + used.system)

    def memory_mb(self) -> float:
        """Return the resident memory of the process and its children; shared pages count once a process."""
        root = psutil.Process(self.pid)
        return sum(process.memory_info().rss for process in (root, *root.children(recursive=True))) / 1e6


@contextmanager
def running(name: str, **environment: str) -> Iterator[Service]:
    """Run ``python -m services.<name>`` within the context.

    Raises:
        SystemExit: it did not become healthy.
    """
    job.end_in_order()
    port, began = free_port(), time.monotonic()
    command = [sys.executable, "-m", f"services.{name}", "--host", "127.0.0.1", "--port", str(port)]
    variables = {**os.environ, "LOG_LEVEL": "warning", "JOBGROUP_TOKEN": "", **environment}
    # Standard output has tables only.
    process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=sys.stderr)
    try:
        while not _is_healthy(port):
            if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                raise SystemExit(f"error: {name} did not become healthy; its output is above")
            time.sleep(0.02)
        yield Service(process.pid, port, time.monotonic() - began)
    finally:
        end_all([process], job.END_SECONDS)


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
        self, method: str, path: str, body: bytes = b"", media_type: str = JSON, *, accept: str = JSON
    ) -> bytes:
        """Return the body of the reply.

        Raises:
            RuntimeError: the status is not 200.
        """
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n"
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
