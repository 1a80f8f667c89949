"""The state that all routes of the embedded engine share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fastapi import Request as HttpRequest

from services.embedded_engine.compute.engine import Engine, EngineStoppedError, QueueFullError
from services.embedded_engine.compute.loading import Loaded
from services.embedded_engine.compute.sequences import Request
from services.embedded_engine.compute.weights import WeightsReceiver
from services.engines.settings import EngineSettings
from services.http.problems import ProblemError, printable
from services.http.server import ended_before_client_left
from services.weights.policy_store import ADAPTER_NAME

T = TypeVar("T")


@dataclass
class EngineState:
    """The engine, its model, and the routes' memory between requests."""

    settings: EngineSettings
    loaded: Loaded
    engine: Engine
    receiver: WeightsReceiver
    model_path: str
    """The directory of the weights in use, or MODEL_NAME."""
    started: float = field(default_factory=time.time)
    """Seconds since 1970."""
    adapter_path: str = ""
    """The directory of the LoRA adapter in use, if any, or SGLang's word for an adapter that came as tensors."""
    profile_directory: Path = Path()
    """The directory of the profile that is being recorded, if any."""
    warned_of: set[str] = field(default_factory=set)
    """The parts of requests that the chat template drops and of which the log has already warned."""
    update_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights change."""
    receiver_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while ``receiver`` works, which may wait long for the trainer; updates from disk do not wait for it."""

    def submit(self, request: Request) -> None:
        """Queue a request in the engine.

        Raises:
            ProblemError: 429 when too many requests wait, 503 when the engine ends.
        """
        with _refusals():
            self.engine.submit(request)

    async def generate(self, request: Request, http: HttpRequest) -> Request:
        """Have the engine do a request, and abort it if its client leaves.

        Raises:
            ProblemError: 429 when too many requests wait, 503 when the engine ends.
        """
        self.submit(request)
        done = asyncio.wrap_future(request.done)
        if not await ended_before_client_left(http, done):
            self.abort(request, "the client left")
        with _refusals():
            return await done

    def uses_adapter(self, lora_path: str | None) -> bool:
        """Return whether ``lora_path`` of a request names the LoRA adapter, which during a pause may be yet to come.

        Raises:
            ProblemError: 400, no adapter of that name is loaded.
        """
        if not lora_path:
            return False
        is_awaited = self.engine.is_paused and lora_path == ADAPTER_NAME
        if lora_path != self.engine.adapter_name and not is_awaited:
            loaded = self.engine.adapter_name or "none"
            raise ProblemError(400, f"LoRA adapter {printable(lora_path)} is not loaded; loaded is {loaded}")
        return True

    def abort(self, request: Request, reason: str) -> None:
        """Have the engine end a request."""
        self.engine.abort(lambda sequence: sequence.request is request, reason)


async def wait_for(future: Future[T]) -> T:
    """Return the result of a call in the engine's thread.

    Raises:
        ProblemError: 503 when the engine ends.
    """
    with _refusals():
        return await asyncio.wrap_future(future)


def state_of(http: HttpRequest) -> EngineState:
    """Return the state of the application that got this request."""
    state: EngineState = http.app.state.engine
    return state


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn the engine's refusals into replies that tell the client to try again."""
    try:
        yield
    except QueueFullError as error:
        raise ProblemError(429, f"{error}; send it later or elsewhere", headers={"Retry-After": "1"}) from error
    except EngineStoppedError as error:
        raise ProblemError(503, str(error), headers={"Retry-After": "1"}) from error
