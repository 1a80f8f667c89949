"""What the tests of the embedded engine share: small models, and engines in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from services.embedded_engine.engine import Engine
from services.embedded_engine.loading import Loaded, load
from services.embedded_engine.requests import SamplingParams, make_request
from services.embedded_engine.scheduler import Request, Sequence
from services.engines.settings import EngineSettings
from tests.tolerance import type_in_force
from tests.waiting import IDLE_SECONDS

PROMPT = [5, 12, 6, 15]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models are fastest so, and tests run beside each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings_for(model: Path, **fields: Any) -> EngineSettings:
    return EngineSettings.load(model_name=str(model), **fields)


class RunningEngine:
    """An engine with its model, and short ways to ask it."""

    def __init__(self, loaded: Loaded, max_queued: int) -> None:
        self.loaded = loaded
        self.failures: list[Exception] = []
        self.engine = Engine(loaded, self.failures.append, max_queued=max_queued, prefill_tokens=64)
        self._watchers: dict[Request, Callable[[Sequence], Any]] = {}
        self._finish_reason = self.engine._scheduler._finish_reason
        self.engine._scheduler._finish_reason = self._watch  # type: ignore[method-assign]
        self.engine.start()

    def _watch(self, sequence: Sequence, token: int) -> Any:
        """Tell the watcher of a request, in the engine's thread, about each new token."""
        self._watchers.get(sequence.request, lambda _: None)(sequence)
        return self._finish_reason(sequence, token)

    def submit(self, prompt: list[int] | None = None, *, on_progress: Any = None, **fields: Any) -> Future[Request]:
        """Submit a request; fields are sampling parameters or make_request's own."""
        own = {key: fields.pop(key) for key in ("rid", "use_adapter", "logprob_start", "top_logprobs") if key in fields}
        params = SamplingParams.model_validate({"max_new_tokens": 8, "ignore_eos": True, **fields})
        request = make_request(PROMPT if prompt is None else prompt, params, self.loaded, **own)
        if on_progress is not None:
            self._watchers[request] = on_progress
        self.engine.submit(request)
        return request.done

    def generate(self, prompt: list[int] | None = None, **fields: Any) -> Request:
        return self.submit(prompt, **fields).result(IDLE_SECONDS)


@pytest.fixture
def compute_type() -> str:
    """The type of numbers that engines compute in, unless the test is one of ``both_types``."""
    return type_in_force("ENGINE_DTYPE")


@pytest.fixture
def make_engine(tiny_model: Path, compute_type: str) -> Iterator[Callable[..., RunningEngine]]:
    """Makes running engines with the tiny model; settings by keyword."""
    running: list[RunningEngine] = []

    def make(model: Path = tiny_model, *, max_queued: int = 100, **fields: Any) -> RunningEngine:
        loaded = load(settings_for(model, engine_dtype=compute_type, **fields))
        running.append(RunningEngine(loaded, max_queued))
        return running[-1]

    yield make
    for one in running:
        one.engine.stop()


@pytest.fixture
def engine(make_engine: Callable[..., RunningEngine]) -> RunningEngine:
    return make_engine()
