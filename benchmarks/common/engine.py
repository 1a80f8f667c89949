"""The embedded engine within a benchmark's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from services.embedded_engine.compute.engine import Engine
from services.embedded_engine.compute.loading import Loaded
from services.embedded_engine.http.requests import SamplingParams, make_request

SECONDS = 600.0
"""Longest time that one call may take."""

Sample = Callable[[Sequence[list[int]], Sequence[SamplingParams]], list[Any]]
"""Completes prompts, each with its own parameters, and returns the finished requests in the same order."""


@contextmanager
def embedded_engine(loaded: Loaded) -> Iterator[Sample]:
    """Run an engine while the context lasts."""
    engine = Engine(loaded, on_failure=print)

    def sample(prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Any]:
        requests = [make_request(prompt, one, loaded) for prompt, one in zip(prompts, params, strict=True)]
        for request in requests:
            engine.submit(request)
        return [request.done.result(SECONDS) for request in requests]

    engine.start()
    try:
        yield sample
    finally:
        engine.stop()
