"""Gathers states of many requests into batches for one policy.

A batch starts when it is full, or when its oldest state has waited for the timeout. It computes in a thread of its own,
and the next one gathers meanwhile. Requests are read whole before their states come here, and replies are written by
the server after their batch is done, so a slow client holds up nothing but itself.
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
    """The states of a request that are not decided yet, and the decisions so far."""

    rows: NDArray[np.float32]
    arrived: float
    done: asyncio.Future[list[Decision]]
    taken: int = 0
    decisions: list[Decision] = field(default_factory=list)


class Batcher:
    """One policy's batches. An async context manager."""

    def __init__(
        self, name: str, compute: Compute, *, batch_size: int, timeout_seconds: float, max_waiting: int
    ) -> None:
        self._compute = compute
        self._batch_size = batch_size
        self._timeout = timeout_seconds
        self._max_waiting = max_waiting
        self._queue: deque[_Request] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"policy-{name}")
        self._running: asyncio.Task[None] | None = None
        self._metrics = (BATCH.labels(name), COMPUTE.labels(name), WAIT.labels(name))
        self.waiting = 0
        """States that no batch has taken yet."""
        self.computing_since: float | None = None
        self.batches = 0
        self.states = 0
        self.sizes: Counter[int] = Counter()
        self.compute_seconds = 0.0

    async def __aenter__(self) -> Batcher:
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._running is not None
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
        for request in self._queue:
            if not request.done.done():
                request.done.set_exception(PolicyFailedError("the head ends"))
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def submit(self, rows: NDArray[np.float32]) -> list[Decision]:
        """The decisions for ``rows``, in order.

        Raises:
            OverloadedError: too many states wait.
            PolicyFailedError: the policy raised, or gave what is no action.
        """
        if self.waiting + len(rows) > self._max_waiting and self.waiting:
            rate = self.states / self.compute_seconds if self.compute_seconds else float(self._batch_size)
            raise OverloadedError(
                f"{self.waiting} states wait already, allowed are {self._max_waiting} (HEAD_MAX_WAITING)",
                retry_after=min(30, 1 + int(self.waiting / rate)),
            )
        request = _Request(rows, time.monotonic(), asyncio.get_running_loop().create_future())
        self._queue.append(request)
        self.waiting += len(rows)
        self._arrived.set()
        try:
            return await request.done
        finally:
            request.done.cancel()

    async def _run(self) -> None:
        while True:
            await self._gather()
            parts = self._take()
            if parts:
                await self._decide(parts)

    async def _gather(self) -> None:
        """Returns when a batch is full or its oldest state has waited long enough."""
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        end = self._queue[0].arrived + self._timeout
        while self.waiting < self._batch_size and (left := end - time.monotonic()) > 0:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._arrived.wait()

    def _take(self) -> list[tuple[_Request, int]]:
        """Requests with how many of their states are in the next batch."""
        parts: list[tuple[_Request, int]] = []
        free, now = self._batch_size, time.monotonic()
        while self._queue and free:
            request = self._queue[0]
            left = len(request.rows) - request.taken
            if request.done.done():  # nobody waits for it any more
                self._queue.popleft()
                self.waiting -= left
                continue
            count = min(left, free)
            parts.append((request, count))
            self._metrics[2].observe(now - request.arrived)
            self.waiting -= count
            free -= count
            if count == left:
                self._queue.popleft()
        return parts

    async def _decide(self, parts: Sequence[tuple[_Request, int]]) -> None:
        rows = np.concatenate([request.rows[request.taken : request.taken + count] for request, count in parts])
        self.computing_since = started = time.monotonic()
        try:
            decisions = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, rows)
        # A policy is somebody's module and may raise anything; those who asked are told, the next batch goes on.
        except Exception as error:  # noqa: BLE001
            log.warning("a batch failed", states=len(rows), error=repr(error))
            for request, count in parts:
                request.taken += count
                _fail(request, PolicyFailedError(f"the policy raised {type(error).__name__}: {error}"))
                self._drop(request)
            return
        finally:
            self.computing_since = None
        seconds = time.monotonic() - started
        self._count(len(rows), seconds)
        at = 0
        for request, count in parts:
            self._settle(request, decisions[at : at + count])
            at += count

    def _settle(self, request: _Request, decisions: Sequence[Decision | PolicyFailedError]) -> None:
        request.taken += len(decisions)
        for decision in decisions:
            if isinstance(decision, PolicyFailedError):
                _fail(request, decision)
                self._drop(request)
                return
            request.decisions.append(decision)
        if len(request.decisions) == len(request.rows) and not request.done.done():
            request.done.set_result(request.decisions)

    def _drop(self, request: _Request) -> None:
        """Takes what is left of a failed request out of the queue."""
        if self._queue and self._queue[0] is request:
            self._queue.popleft()
            self.waiting -= len(request.rows) - request.taken

    def _count(self, states: int, seconds: float) -> None:
        self.batches += 1
        self.states += states
        self.sizes[states] += 1
        self.compute_seconds += seconds
        self._metrics[0].observe(states)
        self._metrics[1].observe(seconds)


def _fail(request: _Request, error: PolicyFailedError) -> None:
    if not request.done.done():
        request.done.set_exception(error)
