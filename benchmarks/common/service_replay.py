"""Load on the replay-buffer."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson

from benchmarks.common.service import Figure, connect, percentile, running, send_all

GROUP_SIZE = 8
COMPLETION_TOKENS = 128


def figures(*, quick: bool) -> Iterator[Figure]:
    """Measure adding groups, drawing from 100,000, snapshots, and a restart."""
    count = 10_000 if quick else 100_000
    with tempfile.TemporaryDirectory() as directory:
        environment = {"REPLAY_DIR": directory, "REPLAY_CAPACITY": str(count)}
        with running("replay_buffer", **environment) as service:
            yield Figure("groups added", count / _add(service.port, count), "1/s", at_least=500)
            for strategy in ("priority", "recency", "uniform"):
                latencies = asyncio.run(_sample(service.port, strategy, 30 if quick else 200))
                yield percentile(f"64 of {count} by {strategy}", 50, latencies)
                yield percentile(f"64 of {count} by {strategy}", 99, latencies, at_most=50)
            yield Figure(f"{count} groups, memory", service.memory_mb(), "MB")
            disk = sum(file.stat().st_blocks * 512 for file in Path(directory).iterdir()) / 1e6
            yield Figure(f"{count} groups, disk", disk, "MB")
            for path, what in (("/snapshots", "saved"), ("/snapshots/restore", "restored")):
                seconds, _ = asyncio.run(send_all(service.port, 1, path, [orjson.dumps({"label": "benchmark"})]))
                yield Figure(f"snapshot {what}", 1e3 * seconds, "ms")
        with running("replay_buffer", **environment) as service:
            yield Figure(f"restart with {count}", service.start_seconds, "s", at_most=10)


def _experiences(rng: np.random.Generator) -> list[dict[str, object]]:
    ids = rng.integers(0, 150_000, (GROUP_SIZE, COMPLETION_TOKENS)).tolist()
    logprobs = (-rng.exponential(size=(GROUP_SIZE, COMPLETION_TOKENS))).astype(np.float32).tolist()
    return [
        {
            "completion": "She sold 48 clips in April, and half as many in May. " * 8,
            "completion_ids": ids[i],
            "logprobs": logprobs[i],
            "policy_versions": [0] * COMPLETION_TOKENS,
            "finish_reason": "stop",
            "result": {"reward": float(i % 2)},
        }
        for i in range(GROUP_SIZE)
    ]


def _group(number: int, experiences: list[dict[str, object]]) -> dict[str, object]:
    return {
        "group_id": f"group-{number}",
        "prompt": {
            "id": f"clips/{number}",
            "prompt": "Natalia sold clips to 48 of her friends in April. How many?",
            "ground_truth": "72",
            "prompt_ids": list(range(number, number + 80)),
        },
        "sequences": experiences,
    }


def _add(port: int, count: int) -> float:
    """Return the seconds to add groups, 32 a request over 2 connections, without the time to make the requests."""
    rng = np.random.default_rng(0)
    # Groups share experiences, because it takes longer to make an experience than to store it.
    made = [_experiences(rng) for _ in range(50)]
    seconds = 0.0
    for start in range(0, count, 2000):
        bodies = []
        for first in range(start, min(start + 2000, count), 32):
            numbers = range(first, min(first + 32, start + 2000, count))
            groups = [_group(number, made[number % len(made)]) for number in numbers]
            priorities = [0.1 + (number % 97) / 97 for number in numbers]
            bodies.append(orjson.dumps({"groups": groups, "priorities": priorities}))
        seconds += asyncio.run(send_all(port, 2, "/groups", bodies))[0]
    return seconds


async def _sample(port: int, strategy: str, requests: int) -> list[float]:
    """Return the latencies in ms of drawing 64 groups."""
    chooser = random.Random(0)
    latencies = []
    async with connect(port) as connection:
        for _ in range(requests):
            request = {"batch_size": 64, "strategy": strategy, "correction": 0.4, "seed": chooser.randrange(2**32)}
            started = time.perf_counter()
            reply = await connection.request("POST", "/groups/sample", orjson.dumps(request))
            latencies.append(1e3 * (time.perf_counter() - started))
    assert len(orjson.loads(reply)["groups"]) == 64
    return latencies
