"""Load on the data-server."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.service import Figure, connect, percentile, running

CLIENTS = 50


def figures(*, quick: bool) -> Iterator[Figure]:
    """Measure fifty clients at once on a GSM8K-sized file, and a file of a million rows."""
    rows = 100_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory() as directory:
        cache = str(Path(directory) / "cache")
        small = _write_rows(Path(directory) / "small.jsonl", 7_473)
        with running("data_server", DATASET=str(small), HF_DATASETS_CACHE=cache) as service:
            latencies, seconds = asyncio.run(_ask_for_prompts(service.port, 20 if quick else 200))
            yield percentile("50 clients", 50, latencies)
            yield percentile("50 clients", 99, latencies, at_most=50)
            yield Figure("50 clients, requests", len(latencies) / seconds, "1/s")
        large = _write_rows(Path(directory) / "large.jsonl", rows)
        for start in ("first", "later"):
            with running("data_server", DATASET=str(large), HF_DATASETS_CACHE=cache) as service:
                yield Figure(f"{rows} rows, {start} start", service.start_seconds, "s", at_most=15)
                latencies, _ = asyncio.run(_ask_for_prompts(service.port, 10 if quick else 100, shared=True))
                memory = service.memory_mb()
        yield percentile(f"{rows} rows", 99, latencies)
        yield Figure(f"{rows} rows, memory", memory, "MB", at_most=1000)


def _write_rows(path: Path, count: int) -> Path:
    """Write questions of about the length and form of GSM8K's."""
    filler = "Natalia sold clips to her friends, and then she sold half as many clips in the month after it. " * 2
    with path.open("w") as file:
        for i in range(count):
            answer = f"She sold {i}/2 = {i // 2} clips in May.\nAltogether she sold {i + i // 2}.\n#### {i + i // 2}"
            file.write(json.dumps({"question": f"{filler}She began with {i}. How many?", "answer": answer}) + "\n")
    return path


async def _ask_for_prompts(port: int, requests: int, *, shared: bool = False) -> tuple[list[float], float]:
    """Return the latencies in ms of clients that each send one request after the other, and the seconds for all.

    Clients with one ``shared`` cursor get different prompts, so that no prompt is rendered twice.
    """
    latencies: list[float] = []

    async def client(number: int) -> None:
        consumer = "all" if shared else f"client-{number}"
        async with connect(port) as connection:
            for _ in range(requests):
                started = time.perf_counter()
                await connection.request("GET", f"/prompts?batch_size=4&consumer={consumer}")
                latencies.append(1e3 * (time.perf_counter() - started))

    started = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return latencies, time.perf_counter() - started
