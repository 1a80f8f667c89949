"""What all routes of the embedded engine work on."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from services.embedded_engine.compute import sequences
from services.embedded_engine.compute.broadcast import WeightsReceiver
from services.embedded_engine.compute.engine import Engine, EngineStoppedError, QueueFullError
from services.embedded_engine.compute.loading import Loaded
from services.embedded_engine.http import sglang_wire
from services.http.problems import ProblemError

T = TypeVar("T")


@dataclass
class Served:
    """What the routes work on."""

    loaded: Loaded
    engine: Engine
    limits: sglang_wire.PromptLimits
    model_path: str
    model_name: str
    receiver: WeightsReceiver
    keep_memory: bool
    """Whether the memory of replaced weights is kept for the next ones."""
    started: float = field(default_factory=time.time)
    """Seconds since 1970."""
    warned_of: set[str] = field(default_factory=set)
    """The parts of requests that the chat template drops and the log has already named."""
    update_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights change."""
    receiver_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while ``receiver`` works, which may wait long for the trainer; updates from disk do not wait for it."""

    async def generate(self, request: sequences.Request, http: Request) -> sequences.Request:
        """Has the engine do a request; it is aborted if its client leaves.

        Raises:
            ProblemError: 429 when too many requests wait, 503 when the engine ends.
        """
        self.submit(request)
        done = asyncio.wrap_future(request.done)
        gone = asyncio.create_task(_disconnected(http))
        try:
            both: set[asyncio.Future[Any]] = {done, gone}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                self.abort(request, "the client left")
            return await done
        except EngineStoppedError as error:
            raise ProblemError(503, str(error), headers={"Retry-After": "1"}) from error
        finally:
            gone.cancel()

    def submit(self, request: sequences.Request) -> None:
        """Gives a request to the engine.

        Raises:
            ProblemError: 429 when too many requests wait, 503 when the engine ends.
        """
        try:
            self.engine.submit(request)
        except QueueFullError as error:
            raise ProblemError(429, f"{error}; send it later or elsewhere", headers={"Retry-After": "1"}) from error
        except EngineStoppedError as error:
            raise ProblemError(503, str(error), headers={"Retry-After": "1"}) from error

    def abort(self, request: sequences.Request, reason: str) -> None:
        """Has the engine end a request."""
        self.engine.abort(lambda sequence: sequence.request is request, reason)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def wait_for(future: Future[T]) -> T:
    """The result of what the engine's thread does.

    Raises:
        ProblemError: 503 when the engine ends.
    """
    try:
        return await asyncio.wrap_future(future)
    except EngineStoppedError as error:
        raise ProblemError(503, str(error), headers={"Retry-After": "1"}) from error


def served_by(http: Request) -> Served:
    """What the application that got this request serves."""
    served: Served = http.app.state.served
    return served
