"""Programs in boxes: answers a second by forks of warm interpreters, their latency, and the start of a box."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from functools import partial

from benchmarks.harness import Args, Benchmark, Option, Side
from benchmarks.service import Figure, figure_table, measure_figures, percentile
from services.core.machine import cores
from services.sandbox.backends import AUTOMATIC, BackendName, Interpreter
from services.sandbox.box import Box, Outcome
from services.sandbox.kernel import Limits
from services.sandbox.pool import BoxPool
from services.sandbox.probe import attack

SOURCE = "def f(a, b):\n    return {} * a + b"


def figures(backend: BackendName, interpreter: Interpreter, args: Args) -> Iterator[Figure]:
    """Measure one backend."""
    yield from asyncio.run(_measure(backend, interpreter, args))


async def _measure(backend: BackendName, interpreter: Interpreter, args: Args) -> list[Figure]:
    starts, latencies = [], []
    for _ in range(args.starts):
        began = time.perf_counter()
        box = await Box(backend, interpreter, Limits()).start()
        starts.append(1000 * (time.perf_counter() - began))
        await box.close()
    pool = BoxPool(backend, interpreter, Limits(), cores())
    await pool.start()

    async def answer(numbers: Iterator[int]) -> None:
        for number in numbers:
            began = time.perf_counter()
            source, inputs = SOURCE.format(number), [[1, 2], [3, 4], [5, 6]]
            result = await pool.run("calls", seconds=60.0, source=source, name="f", inputs=inputs)
            assert result.outcome is Outcome.OK, result
            latencies.append(1000 * (time.perf_counter() - began))

    numbers, began = iter(range(args.answers)), time.perf_counter()
    # One for each box, so that no answer waits for one.
    await asyncio.gather(*(answer(numbers) for _ in range(cores())))
    rate = args.answers / (time.perf_counter() - began)
    await pool.stop()
    answers = [percentile("answers", 50, latencies), percentile("answers", 99, latencies)]
    return [Figure("answers, a box a core", rate, "1/s"), *answers, percentile("start of a box", 50, starts)]


def measure(args: Args) -> list[Side]:
    """Run one-line functions, each on three calls, in warm boxes of every backend that holds on this machine."""
    interpreter = Interpreter.find(sys.executable)
    backends = [one for one in AUTOMATIC if not asyncio.run(attack(one, interpreter, writes=False))]
    return measure_figures({one.value: partial(figures, one, interpreter, args) for one in backends}, args)


SANDBOX = Benchmark(
    measure,
    figure_table("Programs in boxes"),
    rounds=5,
    quick={"answers": 200, "starts": 3},
    options={"answers": Option(2000, "answers of a round"), "starts": Option(20, "boxes that a round starts")},
)
