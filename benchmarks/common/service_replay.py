"""Load on the replay-buffer: groups added and sampled, a snapshot, a restart."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import orjson

from benchmarks.common.serving import Connection, Result, percentile, running

GROUP_SIZE = 8
COMPLETION_TOKENS = 128


def bench_replay(quick: bool) -> list[Result]:
    """Measure adding 100,000 groups (10,000 if ``quick``), sampling from them, a snapshot, and a restart."""
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
    """Return the seconds to add groups, 32 a request over 2 connections, without making the requests."""
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
    """Return the latencies of sampling 64 groups, in ms."""
    connection = await Connection.open(port)
    chooser = random.Random(0)
    latencies = []
    for _ in range(requests):
        request = {"batch_size": 64, "strategy": strategy, "correction": 0.4, "seed": chooser.randrange(2**32)}
        started = time.perf_counter()
        reply = await connection.request("POST", "/groups/sample", orjson.dumps(request))
        latencies.append(1e3 * (time.perf_counter() - started))
    assert len(orjson.loads(reply)["groups"]) == 64
    connection.close()
    return latencies


async def _snapshots(port: int) -> tuple[float, float]:
    """Return the times to save and to restore a snapshot, in ms."""
    connection = await Connection.open(port)
    seconds = []
    for path in ("/snapshots", "/snapshots/restore"):
        started = time.perf_counter()
        await connection.request("POST", path, orjson.dumps({"label": "benchmark"}))
        seconds.append(1e3 * (time.perf_counter() - started))
    connection.close()
    return seconds[0], seconds[1]
