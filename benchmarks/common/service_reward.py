"""Load on the reward-server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

import orjson

from benchmarks.common.service import Figure, connect, percentile, running, send_all

ITEMS = 500
"""Completions of a request."""


def figures(*, quick: bool) -> Iterator[Figure]:
    """Measure plain completions, and hostile ones among them, whose check runs into the timeout."""
    plain = [_plain(i) for i in range(5_000 if quick else 20_000)]
    # No two hostile completions are equal, so that no cache helps.
    mixed = [_plain(i) if i % 100 else _hostile(9, i) for i in range(1_000 if quick else 3_000)]
    with running("reward_server", REWARD_FN="math") as service:
        _score(service.port, plain[:1000])
        seconds, replies = _score(service.port, plain)
        assert all(reply["reward"] == 1.0 for reply in replies)
        yield Figure("plain answers", len(plain) / seconds, "1/s", at_least=5_000)
        seconds, replies = _score(service.port, mixed)
        lost = sum(reply["status"] == "timeout" for reply in replies)
        assert lost == len(mixed) // 100, f"{lost} of {len(mixed)} answers timed out"
        yield Figure("1 in 100 hostile", len(mixed) / seconds, "1/s", at_least=500)
        latencies = asyncio.run(_plain_beside_hostile(service.port, 20 if quick else 60))
        yield percentile("plain answer beside hostile ones", 99, latencies)
        yield Figure("memory, workers included", service.memory_mb(), "MB")


def _plain(number: int) -> dict[str, str]:
    text = f"She had 3 and bought {number - 3} more. The answer is {number}."
    return {"prompt": "How many?", "response": text, "ground_truth": str(number)}


def _hostile(base: int, number: int) -> dict[str, str]:
    return {"prompt": "", "response": rf"\boxed{{{base}^{{9^{{{number + 9}}}}}}}", "ground_truth": "5"}


def _score(port: int, items: Sequence[dict[str, str]]) -> tuple[float, list[dict[str, object]]]:
    bodies = [orjson.dumps({"items": items[start : start + ITEMS]}) for start in range(0, len(items), ITEMS)]
    seconds, replies = asyncio.run(send_all(port, min(4, len(bodies)), "/batch_reward", bodies))
    return seconds, [reward for reply in replies for reward in orjson.loads(reply)["rewards"]]


async def _plain_beside_hostile(port: int, hostile: int) -> list[float]:
    """Return the milliseconds of single plain requests while hostile completions keep every worker busy."""
    body = orjson.dumps(_plain(5))
    latencies: list[float] = []
    items = orjson.dumps({"items": [_hostile(8, i) for i in range(hostile)]})
    async with connect(port) as connection, connect(port) as other:
        busy = asyncio.create_task(other.request("POST", "/batch_reward", items))
        while not busy.done():
            started = time.perf_counter()
            await connection.request("POST", "/reward", body)
            latencies.append(1e3 * (time.perf_counter() - started))
            await asyncio.sleep(0.005)
        await busy
    return latencies
