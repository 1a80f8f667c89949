"""Policy versions in the forms in which engines get them, and the steps that bring one engine to a version.

The trainer takes these steps with every registered worker at once, and a launcher with an engine of its own that starts
or has missed a version. Neither knows how a version reaches an engine: that is a form's part.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.engines.engine import Engine, Requests, WorkerRefusedError
from services.weights.policy_store import PublishedPolicy, is_adapter

FIRST_VERSION = 0
"""The policy version of MODEL_NAME itself."""


class Form(ABC):
    """A policy version as engines get it."""

    version: int
    is_adapter: bool = False
    """The version is a LoRA adapter, which engines compute with in addition to their weights."""

    async def prepare(self, worker: Engine) -> None:  # noqa: B027  # most forms are ready
        """Wait until a worker, which generates nothing now, can load the version."""

    @abstractmethod
    async def load(self, worker: Engine) -> None:
        """Have a prepared worker load the version."""

    def forgo(self, url: str) -> None:  # noqa: B027  # most forms wait for no worker
        """Expect the worker at ``url`` no longer."""

    async def close(self) -> None:  # noqa: B027  # most forms hold nothing
        """Give back what the form holds, once no worker loads it any more."""


@dataclass(frozen=True)
class Directory(Form):
    """A version as a directory, or as a name on the hub, of a model or a LoRA adapter."""

    version: int
    path: Path | str
    is_adapter: bool = False

    @classmethod
    def of(cls, policy: PublishedPolicy) -> Self:
        """Return a published version; this reads its directory."""
        return cls(policy.version, policy.path, is_adapter(policy.path))

    async def load(self, worker: Engine) -> None:
        """See Form."""
        load = worker.load_adapter if self.is_adapter else worker.load_model
        await load(self.path, self.version)


async def serve(worker: Engine, form: Form, requests: Requests, seconds: float | None = None) -> float:
    """Have a worker serve a version; return the seconds for which it generated nothing.

    After a failure the worker stays paused, because its weights may be of two versions. It must leave the routing then.

    Args:
        worker: the worker.
        form: the version to serve.
        requests: the fate of the requests in flight.
        seconds: longest time for the pause to begin, and again for the load.

    Raises:
        WorkerRefusedError: the worker refused a step, or serves another version afterwards.
        DependencyLostError: the worker did not answer.
        TimeoutError: the steps took longer than ``seconds``.
    """
    started = time.perf_counter()
    async with asyncio.timeout(seconds):
        await worker.hold(requests, for_adapter=form.is_adapter)
    await form.prepare(worker)
    async with asyncio.timeout(seconds):
        await form.load(worker)
        await worker.resume()
        pause = time.perf_counter() - started
        served = await worker.version()
    if served != form.version:
        raise WorkerRefusedError(
            f"worker {worker.url} loaded policy version {form.version} but says that it serves {served}"
        )
    return pause
