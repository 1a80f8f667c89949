"""The reward-server under load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import orjson

from benchmarks.common.serving import Connection, Result, percentile, running


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
