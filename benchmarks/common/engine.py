"""The embedded engine within a benchmark's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from services.embedded_engine.compute.batch import Limits
from services.embedded_engine.compute.engine import Engine
from services.embedded_engine.compute.loading import Loaded
from services.embedded_engine.http import sglang_wire

MAX_WAITING = 1024
PREFILL_TOKENS = 2048
SECONDS = 600.0
"""Longest time that one call may take."""

Sample = Callable[[Sequence[list[int]], Sequence[sglang_wire.SamplingParams]], list[Any]]
"""Completes prompts, each with its own parameters, and returns the finished requests in the same order."""


@contextmanager
def embedded_engine(loaded: Loaded) -> Iterator[Sample]:
    """Run an engine while the context lasts."""
    limits = Limits(loaded.max_running, MAX_WAITING, PREFILL_TOKENS)
    engine = Engine(loaded.model, loaded.cache, limits, "0", loaded.decode_text, on_failure=print)
    known = sglang_wire.PromptLimits(loaded.model.architecture.vocab_size, loaded.model.context_length, loaded.end_ids)

    def sample(prompts: Sequence[list[int]], params: Sequence[sglang_wire.SamplingParams]) -> list[Any]:
        requests = [sglang_wire.make_request(prompt, one, known) for prompt, one in zip(prompts, params, strict=True)]
        for request in requests:
            engine.submit(request)
        return [request.done.result(SECONDS) for request in requests]

    engine.start()
    try:
        yield sample
    finally:
        engine.stop()
