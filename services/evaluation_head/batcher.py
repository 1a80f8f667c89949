"""Gathers the states of many requests into batches for one policy.

A batch starts when it is full, when as many states are there as came together lately, or when the timeout has passed
since its oldest state came or the last batch ended. So clients that wait for the last batch share the next one with
those that came meanwhile, instead of taking turns in two halves. A batch computes in a thread of its own while the
states of the next one arrive. Requests are read whole before their states come here, and replies are written after
their batches, so a slow client delays nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Histogram

from services.core.logs import get_logger
from services.evaluation_head import policy
from services.evaluation_head.policy import Decision, OverloadedError, PolicyFailedError

log = get_logger(__name__)

BATCH = Histogram(
    "head_batch_states", "States in a batch.", ["policy"], buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
)
COMPUTE = Histogram("head_batch_seconds", "Time that a batch takes to compute.", ["policy"])
WAIT = Histogram("head_wait_seconds", "Time that a state waits until its batch starts.", ["policy"])

KEPT_BATCHES = 8
"""Batches that tell how many states come together."""

_Piece = tuple["_Request", NDArray[np.float32]]
"""Some of a request's states [count, *shape], in order."""
Compute = Callable[[NDArray[np.float32]], Sequence[Decision | PolicyFailedError]]


@dataclass(eq=False)
class _Request:
    """A request for ``count`` decisions, and the decisions so far."""

    count: int
    done: asyncio.Future[list[Decision]]
    arrived: float = field(default_factory=time.monotonic)
    decisions: list[Decision] = field(default_factory=list)

    def take(self, decisions: Sequence[Decision | PolicyFailedError]) -> None:
        """Take the decisions for the request's next states; end the request with the last one or with an error."""
        if self.done.done():
            return
        for decision in decisions:
            if isinstance(decision, PolicyFailedError):
                self.done.set_exception(decision)
                return
            self.decisions.append(decision)
        if len(self.decisions) == self.count:
            self.done.set_result(self.decisions)


class Batcher:
    """The batches of one policy. An async context manager."""

    def __init__(self, name: str, compute: Compute, *, batch_size: int, timeout_seconds: float) -> None:
        self._compute = compute
        self._batch_size = batch_size
        self._timeout = timeout_seconds
        self._queue: asyncio.Queue[_Piece] = asyncio.Queue()
        self._rest: _Piece | None = None
        """States of the last piece that found no room in its batch."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"policy-{name}")
        self._running: asyncio.Task[None] | None = None
        self._batch, self._seconds, self._wait = BATCH.labels(name), COMPUTE.labels(name), WAIT.labels(name)
        self.waiting = 0
        """States whose batch has not started yet."""
        self._together = deque([batch_size], KEPT_BATCHES)
        """For each of the last batches: its states, and those that came while it computed."""
        self._ended = 0.0
        """When the last batch ended, by time.monotonic."""
        self.sizes: Counter[int] = Counter()
        """Batches by their number of states."""
        self.states = 0
        self.compute_seconds = 0.0

    async def __aenter__(self) -> Batcher:
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._running is not None
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def submit(self, states: NDArray[np.float32]) -> list[Decision]:
        """Return the decisions for ``states`` [count, *shape], in order.

        Raises:
            OverloadedError: too many states wait.
            PolicyFailedError: the policy raised, or its output is not an action.
        """
        if self.waiting and self.waiting + len(states) > policy.MAX_WAITING:
            rate = self.states / self.compute_seconds if self.compute_seconds else float(self._batch_size)
            raise OverloadedError(self.waiting, retry_after=min(30, 1 + int(self.waiting / rate)))
        request = _Request(len(states), asyncio.get_running_loop().create_future())
        self._queue.put_nowait((request, states))
        self.waiting += len(states)
        try:
            return await request.done
        finally:
            # The states of a client that left are passed over.
            request.done.cancel()

    async def _run(self) -> None:
        while True:
            pieces = [await self._next(self._batch_size)]
            size = len(pieces[0][1])
            left = max(pieces[0][0].arrived, self._ended) + self._timeout - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    # After the timeout this still takes the states that are there, because it does not wait for them.
                    while size < self._batch_size and (size < max(self._together) or self._has_more):
                        pieces.append(await self._next(self._batch_size - size))
                        size += len(pieces[-1][1])
            self.waiting -= size
            if pieces := [(request, states) for request, states in pieces if not request.done.done()]:
                await self._decide(pieces)
            self._ended = time.monotonic()
            self._together.append(min(self._batch_size, size + self.waiting))

    @property
    def _has_more(self) -> bool:
        return self._rest is not None or not self._queue.empty()

    async def _next(self, room: int) -> _Piece:
        """Return the next states of one request, ``room`` of them at most."""
        request, states = self._rest or await self._queue.get()
        self._rest = (request, states[room:]) if len(states) > room else None
        return request, states[:room]

    async def _decide(self, pieces: Sequence[_Piece]) -> None:
        """Compute the decisions for one batch."""
        started = time.monotonic()
        for request in {request for request, _ in pieces}:
            self._wait.observe(started - request.arrived)
        states = np.concatenate([states for _, states in pieces])
        decisions: Sequence[Decision | PolicyFailedError]
        try:
            decisions = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, states)
        # A policy is anybody's module and may raise anything. Its clients are told, and the next batch goes on.
        except Exception as error:  # noqa: BLE001
            log.warning("a batch failed", states=len(states), error=repr(error))
            decisions = [PolicyFailedError(f"the policy raised {type(error).__name__}: {error}")] * len(states)
        seconds = time.monotonic() - started
        self.sizes[len(states)] += 1
        self.states += len(states)
        self.compute_seconds += seconds
        self._batch.observe(len(states))
        self._seconds.observe(seconds)
        start = 0
        for request, part in pieces:
            request.take(decisions[start : start + len(part)])
            start += len(part)
