"""The steps that bring one engine to a policy version.

The trainer takes these steps with every registered worker at once, and a launcher with an engine of its own that starts
or has missed a version. How the version reaches the engine is the part of ``Delivery.load``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from services.engines.engine import Engine, Requests, WorkerRefusedError


@dataclass(frozen=True)
class Delivery:
    """A policy version on its way to engines."""

    version: int
    load: Callable[[Engine], Awaitable[None]]
    """Has an engine, which generates nothing now, load the version."""
    is_adapter: bool = False
    """The version is a LoRA adapter, which engines compute with in addition to their weights."""


def from_directory(version: int, path: Path | str, *, is_adapter: bool = False) -> Delivery:
    """Return a version that engines read from a directory, or by a name on the hub, of a model or a LoRA adapter."""
    if is_adapter:
        return Delivery(version, lambda engine: engine.load_adapter(path, version), is_adapter=True)
    return Delivery(version, lambda engine: engine.load_model(path, version))


async def serve(worker: Engine, delivery: Delivery, requests: Requests, seconds: float | None = None) -> float:
    """Have a worker serve a version; return the seconds for which it generated nothing.

    After a failure the worker stays paused, because its weights may be of two versions. It must leave the routing then.

    Args:
        worker: the worker.
        delivery: the version to serve.
        requests: the fate of the requests in flight.
        seconds: longest time for the pause to begin, and again for the load.

    Raises:
        WorkerRefusedError: the worker refused a step, or serves another version afterwards.
        DependencyLostError: the worker did not answer.
        TimeoutError: the steps took longer than ``seconds``.
    """
    started = time.perf_counter()
    async with asyncio.timeout(seconds):
        await worker.hold(requests, for_adapter=delivery.is_adapter)
    async with asyncio.timeout(seconds):
        await delivery.load(worker)
        return await resume(worker, delivery.version, started)


async def resume(worker: Engine, version: int, started: float) -> float:
    """Have a worker that has loaded a version generate again; return the seconds since ``started``, its pause's begin.

    Raises:
        WorkerRefusedError: the worker refused a step, or serves another version.
        DependencyLostError: the worker did not answer.
    """
    await worker.resume()
    pause = time.perf_counter() - started
    served = await worker.version()
    if served != version:
        raise WorkerRefusedError(
            f"worker {worker.url} loaded policy version {version} but says that it serves {served}"
        )
    return pause
