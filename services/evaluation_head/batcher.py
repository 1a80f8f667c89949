"""Gathers the states of many requests into batches for one policy.

A batch starts when it is full, or when its oldest state has waited for the timeout. It computes in a thread of its own
while the next one gathers. Requests are read whole before their states come here, and replies are written after their
batches, so a slow client delays nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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

Compute = Callable[[NDArray[np.float32]], Sequence[Decision | PolicyFailedError]]


@dataclass
class _Request:
    """A request's states [count, *shape], and the decisions so far."""

    states: NDArray[np.float32]
    done: asyncio.Future[list[Decision]]
    arrived: float = field(default_factory=time.monotonic)
    decisions: list[Decision] = field(default_factory=list)

    def fail(self, error: PolicyFailedError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def take(self, decisions: Sequence[Decision | PolicyFailedError]) -> None:
        for decision in decisions:
            if isinstance(decision, PolicyFailedError):
                self.fail(decision)
                return
            self.decisions.append(decision)
        if len(self.decisions) == len(self.states) and not self.done.done():
            self.done.set_result(self.decisions)


_Part = tuple[_Request, NDArray[np.float32]]


class Batcher:
    """The batches of one policy. An async context manager."""

    def __init__(self, name: str, compute: Compute, *, batch_size: int, timeout_seconds: float) -> None:
        self._compute = compute
        self._batch_size = batch_size
        self._timeout = timeout_seconds
        self._queue: deque[_Part] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"policy-{name}")
        self._running: asyncio.Task[None] | None = None
        self._batch, self._seconds, self._wait = BATCH.labels(name), COMPUTE.labels(name), WAIT.labels(name)
        self.waiting = 0
        """States that no batch has taken yet."""
        self.computing_since: float | None = None
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
        for request, _states in self._queue:
            request.fail(PolicyFailedError("the head ends"))
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
        request = _Request(states, asyncio.get_running_loop().create_future())
        self._queue.append((request, states))
        self.waiting += len(states)
        self._arrived.set()
        try:
            return await request.done
        finally:
            # The states of a client that left are passed over.
            request.done.cancel()

    async def _run(self) -> None:
        while True:
            await self._gather()
            if batch := self._take():
                await self._decide(batch)

    async def _gather(self) -> None:
        """Return when a batch is full or its oldest state has waited long enough."""
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        end = self._queue[0][0].arrived + self._timeout
        while self.waiting < self._batch_size and (left := end - time.monotonic()) > 0:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._arrived.wait()

    def _take(self) -> list[_Part]:
        """Return the next batch: requests with those of their states that are in it."""
        batch: list[_Part] = []
        room = self._batch_size
        while self._queue and room:
            request, states = self._queue.popleft()
            if len(states) > room:
                self._queue.appendleft((request, states[room:]))
                states = states[:room]
            self.waiting -= len(states)
            if not request.done.done():
                batch.append((request, states))
                room -= len(states)
        return batch

    async def _decide(self, batch: Sequence[_Part]) -> None:
        self.computing_since = started = time.monotonic()
        for request, _ in batch:
            self._wait.observe(started - request.arrived)
        states = np.concatenate([part for _, part in batch])
        try:
            decisions = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, states)
        # A policy is anybody's module and may raise anything. Its clients are told, and the next batch goes on.
        except Exception as error:  # noqa: BLE001
            log.warning("a batch failed", states=len(states), error=repr(error))
            for request, _ in batch:
                request.fail(PolicyFailedError(f"the policy raised {type(error).__name__}: {error}"))
            return
        finally:
            self.computing_since = None
        seconds = time.monotonic() - started
        self.sizes[len(states)] += 1
        self.states += len(states)
        self.compute_seconds += seconds
        self._batch.observe(len(states))
        self._seconds.observe(seconds)
        left = iter(decisions)
        for request, part in batch:
            request.take(list(itertools.islice(left, len(part))))
