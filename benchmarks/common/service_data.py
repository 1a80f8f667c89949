"""The data-server under load."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path

from benchmarks.common.serving import Connection, Result, percentile, running


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
