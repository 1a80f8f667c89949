"""Measures data-server, reward-server and replay-buffer under the loads that they are built for.

    python -m scripts.benchmark_services [--quick] [--only reward,data,replay] [--json FILE]

Each service runs as a process of its own, as in a job group, and is measured from here over HTTP: latencies at the
client, memory as resident in the service and its children. The load comes from the same machine, so its own cost is in
every number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import orjson
import psutil

GROUP_SIZE = 8
COMPLETION_TOKENS = 128
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

    def own_memory_mb(self) -> float:
        """The same without the pages of mapped files, which the kernel takes back as it needs them (Linux only)."""
        return sum(p.memory_info().rss - getattr(p.memory_info(), "shared", 0) for p in self._processes()) / 1e6

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


# --- reward-server ---------------------------------------------------------------------------------------------------


def bench_reward(quick: bool) -> list[Result]:
    """Plain answers a second, and with one hostile answer in a hundred."""
    count = 5_000 if quick else 20_000
    plain = [(f"She had 3 and bought {i - 3} more. The answer is {i}.", str(i)) for i in range(count)]
    results = []
    with running("reward_server", REWARD_FN="math") as (service, _):
        asyncio.run(_score(service.port, plain[:1000]))
        seconds, replies = asyncio.run(_score(service.port, plain))
        assert all(reply["reward"] == 1.0 for reply in replies)
        results.append(Result("reward-server", "plain answers", count / seconds, "1/s", 5_000))
        mixed = _mixed(1_000 if quick else 3_000)
        seconds, replies = asyncio.run(_score(service.port, mixed))
        lost = sum(reply["status"] == "timeout" for reply in replies)
        assert lost == len(mixed) // 100, f"{lost} of {len(mixed)} answers timed out"
        results.append(Result("reward-server", "1 in 100 hostile", len(mixed) / seconds, "1/s", 500))
        latencies = asyncio.run(_plain_beside_hostile(service.port, 20 if quick else 60))
        results.append(
            Result("reward-server", "plain answer beside hostile ones, p99", percentile(latencies, 99), "ms")
        )
        results.append(Result("reward-server", "memory, workers included", service.memory_mb(), "MB"))
    return results


def _mixed(count: int) -> list[tuple[str, str]]:
    # All hostile ones differ, so that no cache helps.
    return [
        (rf"\boxed{{9^{{9^{{{i + 9}}}}}}}", "5") if i % 100 == 0 else (f"The answer is {i}.", str(i))
        for i in range(count)
    ]


async def _score(port: int, answers: Sequence[tuple[str, str]]) -> tuple[float, list[dict[str, object]]]:
    bodies = []
    for start in range(0, len(answers), 500):
        items = [{"prompt": "How many?", "response": r, "ground_truth": g} for r, g in answers[start : start + 500]]
        bodies.append(orjson.dumps({"items": items}))
    connections = [await Connection.open(port) for _ in range(min(4, len(bodies)))]
    waiting = list(reversed(bodies))
    replies: list[dict[str, object]] = []

    async def feed(connection: Connection) -> None:
        while waiting:
            replies.extend(orjson.loads(await connection.request("POST", "/batch_reward", waiting.pop()))["rewards"])

    started = time.perf_counter()
    await asyncio.gather(*(feed(connection) for connection in connections))
    seconds = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return seconds, replies


async def _plain_beside_hostile(port: int, hostile: int) -> list[float]:
    """Milliseconds of single plain requests while hostile ones keep every worker busy."""
    connections = [await Connection.open(port) for _ in range(2)]
    items = [{"prompt": "", "response": rf"\boxed{{8^{{9^{{{i + 9}}}}}}}", "ground_truth": "5"} for i in range(hostile)]
    busy = asyncio.create_task(connections[0].request("POST", "/batch_reward", orjson.dumps({"items": items})))
    body = orjson.dumps({"prompt": "", "response": "The answer is 5.", "ground_truth": "5"})
    latencies = []
    while not busy.done():
        started = time.perf_counter()
        await connections[1].request("POST", "/reward", body)
        latencies.append(1e3 * (time.perf_counter() - started))
        await asyncio.sleep(0.005)
    await busy
    for connection in connections:
        connection.close()
    return latencies


# --- data-server -----------------------------------------------------------------------------------------------------


def bench_data(quick: bool, model: str | None) -> list[Result]:
    """Fifty clients at once on a GSM8K-sized file, and a file of a million rows."""
    results = []
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = {} if model is None else {"MODEL_NAME": model}
        small = _write_rows(Path(directory) / "small.jsonl", 7_473)
        cache = {"DATASET_CACHE_DIR": str(Path(directory) / "cache")}
        with running("data_server", DATASET=str(small), **cache, **tokenizer) as (service, _):
            latencies, seconds = asyncio.run(_prompt_clients(service.port, 50, 20 if quick else 200))
            results.append(Result("data-server", "50 clients, p50", percentile(latencies, 50), "ms"))
            results.append(
                Result("data-server", "50 clients, p99", percentile(latencies, 99), "ms", 50, at_least=False)
            )
            results.append(Result("data-server", "50 clients, requests", len(latencies) / seconds, "1/s"))
        rows = 100_000 if quick else 1_000_000
        large = _write_rows(Path(directory) / "large.jsonl", rows)
        for what in ("first start", "later start"):
            with running("data_server", DATASET=str(large), **cache, **tokenizer) as (service, started):
                results.append(Result("data-server", f"{rows} rows, {what}", started, "s", 15, at_least=False))
                latencies, _ = asyncio.run(_prompt_clients(service.port, 50, 10 if quick else 100, shared=True))
                if what == "later start":
                    results.append(Result("data-server", f"{rows} rows, p99", percentile(latencies, 99), "ms"))
                    memory = service.memory_mb()
                    results.append(Result("data-server", f"{rows} rows, memory", memory, "MB", 1000, at_least=False))
    return results


def _write_rows(path: Path, count: int) -> Path:
    # About as long as GSM8K's, of its form.
    filler = "Natalia sold clips to her friends, and then she sold half as many clips in the month after it. " * 2
    with path.open("w") as file:
        for i in range(count):
            answer = f"She sold {i}/2 = {i // 2} clips in May.\nAltogether she sold {i + i // 2}.\n#### {i + i // 2}"
            file.write(json.dumps({"question": f"{filler}She began with {i}. How many?", "answer": answer}) + "\n")
    return path


async def _prompt_clients(port: int, clients: int, requests: int, *, shared: bool = False) -> tuple[list[float], float]:
    """Latencies in ms of clients that each ask again as soon as they are answered, and the seconds it took.

    Clients that have one cursor ``shared`` among them get different prompts, so that nothing is rendered twice.
    """
    latencies: list[float] = []

    async def client(number: int) -> None:
        connection = await Connection.open(port)
        for _ in range(requests):
            started = time.perf_counter()
            consumer = "all" if shared else f"client-{number}"
            await connection.request("GET", f"/prompts?batch_size=4&consumer={consumer}")
            latencies.append(1e3 * (time.perf_counter() - started))
        connection.close()

    started = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    return latencies, time.perf_counter() - started


# --- replay-buffer ---------------------------------------------------------------------------------------------------


def bench_replay(quick: bool) -> list[Result]:
    """Adding groups, drawing from 100,000, and starting again with them."""
    count = 10_000 if quick else 100_000
    results = []
    with tempfile.TemporaryDirectory() as directory:
        environment = {"REPLAY_DIR": directory, "REPLAY_CAPACITY": str(count)}
        with running("replay_buffer", **environment) as (service, _):
            seconds = asyncio.run(_add(service.port, count))
            results.append(Result("replay-buffer", "groups added", count / seconds, "1/s", 500))
            for strategy in ("priority", "recency", "uniform"):
                latencies = asyncio.run(_sample(service.port, strategy, 30 if quick else 200))
                what = f"64 of {count} by {strategy}"
                results.append(Result("replay-buffer", f"{what}, p50", percentile(latencies, 50), "ms"))
                results.append(
                    Result("replay-buffer", f"{what}, p99", percentile(latencies, 99), "ms", 50, at_least=False)
                )
            results.append(Result("replay-buffer", f"{count} groups, memory", service.memory_mb(), "MB"))
            own = service.own_memory_mb()
            results.append(Result("replay-buffer", f"{count} groups, memory but for the mapped file", own, "MB"))
            disk = sum(file.stat().st_blocks * 512 for file in Path(directory).iterdir()) / 1e6
            results.append(Result("replay-buffer", f"{count} groups, disk", disk, "MB"))
            saved, restored = asyncio.run(_snapshots(service.port))
            results.append(Result("replay-buffer", "snapshot saved", saved, "ms"))
            results.append(Result("replay-buffer", "snapshot restored", restored, "ms"))
        with running("replay_buffer", **environment) as (_, started):
            results.append(Result("replay-buffer", f"restart with {count}", started, "s", 10, at_least=False))
    return results


def _experiences(rng: np.random.Generator) -> list[dict[str, object]]:
    ids = rng.integers(0, 150_000, (GROUP_SIZE, COMPLETION_TOKENS)).tolist()
    logprobs = (-rng.exponential(size=(GROUP_SIZE, COMPLETION_TOKENS))).astype(np.float32).tolist()
    return [
        {
            "completion": "She sold 48 clips in April, and half as many in May. " * 8,
            "completion_ids": ids[i],
            "logprobs": logprobs[i],
            "policy_versions": [{"version": 0, "start": 0, "end": COMPLETION_TOKENS}],
            "finish_reason": "stop",
            "result": {"reward": float(i % 2)},
        }
        for i in range(GROUP_SIZE)
    ]


def _group(number: int, experiences: list[dict[str, object]]) -> dict[str, object]:
    return {
        "group_id": f"group-{number}",
        "prompt": "Natalia sold clips to 48 of her friends in April. How many?",
        "ground_truth": "72",
        "prompt_ids": list(range(number, number + 80)),
        "experiences": experiences,
    }


async def _add(port: int, count: int) -> float:
    """Seconds to add groups, 32 a request over 2 connections; making the requests is not in it."""
    rng = np.random.default_rng(0)
    # Different groups share experiences, or making them would take longer than storing them.
    made = [_experiences(rng) for _ in range(50)]
    seconds = 0.0
    connections = [await Connection.open(port) for _ in range(2)]
    for start in range(0, count, 2000):
        numbers = range(start, min(start + 2000, count))
        groups = [_group(number, made[number % len(made)]) for number in numbers]
        priorities = [0.1 + (number % 97) / 97 for number in numbers]
        bodies = [
            orjson.dumps({"groups": groups[i : i + 32], "priorities": priorities[i : i + 32]})
            for i in range(0, len(groups), 32)
        ]

        async def feed(connection: Connection, bodies: list[bytes]) -> None:
            while bodies:
                await connection.request("POST", "/groups", bodies.pop())

        started = time.perf_counter()
        await asyncio.gather(*(feed(connection, bodies) for connection in connections))
        seconds += time.perf_counter() - started
    for connection in connections:
        connection.close()
    return seconds


async def _sample(port: int, strategy: str, requests: int) -> list[float]:
    """Latencies in ms of drawing 64 groups."""
    connection = await Connection.open(port)
    chooser = random.Random(0)
    latencies = []
    for number in range(requests + 3):
        request = {"batch_size": 64, "strategy": strategy, "correction": 0.4, "seed": chooser.randrange(2**32)}
        started = time.perf_counter()
        reply = await connection.request("POST", "/groups/sample", orjson.dumps(request))
        # The first ones build the tree of the exponent.
        if number >= 3:
            latencies.append(1e3 * (time.perf_counter() - started))
    assert len(orjson.loads(reply)["groups"]) == 64
    connection.close()
    return latencies


async def _snapshots(port: int) -> tuple[float, float]:
    connection = await Connection.open(port)
    seconds = []
    for path in ("/snapshots", "/snapshots/restore"):
        started = time.perf_counter()
        await connection.request("POST", path, orjson.dumps({"label": "benchmark"}))
        seconds.append(1e3 * (time.perf_counter() - started))
    connection.close()
    return seconds[0], seconds[1]


# --- all -------------------------------------------------------------------------------------------------------------


def measure(only: Sequence[str], *, quick: bool, model: str | None) -> list[Result]:
    """All measurements of the services named."""
    results: list[Result] = []
    if "reward" in only:
        results += bench_reward(quick)
    if "data" in only:
        results += bench_data(quick, model)
    if "replay" in only:
        results += bench_replay(quick)
    return results


def main(given: Sequence[str] | None = None) -> int:
    """Prints a table; exits with 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller loads")
    parser.add_argument("--only", default="reward,data,replay", help="services, with commas")
    parser.add_argument("--model", help="tokenizer for the data-server: a hub name or a directory")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    arguments = parser.parse_args(given)
    results = measure(arguments.only.split(","), quick=arguments.quick, model=arguments.model)
    for result in results:
        target = "" if result.target is None else f"{'>=' if result.at_least else '<='} {result.target:g}"
        mark = {None: "", True: "met", False: "MISSED"}[result.is_met]
        sys.stdout.write(
            f"{result.service:14} {result.what:48} {result.value:10.1f} {result.unit:4} {target:9} {mark}\n"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([{**asdict(r), "is_met": r.is_met} for r in results], indent=1) + "\n")
    return int(any(result.is_met is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
