"""A pool of warm boxes for answers, each of which runs one at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import Counter

from services.sandbox.backends import BackendName, Interpreter
from services.sandbox.box import Box, Outcome, Result, SandboxError
from services.sandbox.kernel import Limits

LOST = Counter("reward_boxes_lost", "Boxes that were lost while they ran an answer's program.")
QUEUE_SECONDS = 120.0
"""The longest wait for the answers before one, because the trainer waits for a batch no longer than 300 s."""
TRIES = 2
"""A piece of code whose box is lost is run once more in another."""


class BoxPool:
    """Boxes in which answers run, first come first served; a box that is lost is replaced by a new one."""

    def __init__(self, backend: BackendName, interpreter: Interpreter, limits: Limits, size: int) -> None:
        """Describe a pool of ``size`` boxes; ``start`` starts them."""
        self._limits = limits
        self._boxes = [Box(backend, interpreter, limits) for _ in range(size)]
        self._free: asyncio.Queue[Box] = asyncio.Queue()
        self._stopping = False
        self._waiting = 0

    async def start(self) -> None:
        """Start the boxes; SandboxError where one cannot be started."""
        await asyncio.gather(*(box.start() for box in self._boxes))
        for box in self._boxes:
            self._free.put_nowait(box)

    async def stop(self) -> None:
        """End the boxes, and what runs in them."""
        self._stopping = True
        await asyncio.gather(*(box.close() for box in self._boxes))

    async def run(self, deed: str, *, seconds: float, **what: Any) -> Result:
        """Do a deed as ``Box.run``, once a box is free; twice at most if its box is lost.

        Raises:
            TimeoutError: no box was free for ``seconds``, nor for the time that the answers before this one may take.
        """
        result = Result(Outcome.INFRASTRUCTURE)
        for _ in range(TRIES):
            rounds = self._waiting // len(self._boxes) + 1
            self._waiting += 1
            try:
                longest = max(seconds, min(rounds * self._limits.seconds, QUEUE_SECONDS))
                box = await asyncio.wait_for(self._free.get(), longest)
            finally:
                self._waiting -= 1
            try:
                if not box.is_alive and not self._stopping:
                    await box.start()
                result = await box.run(deed, **what)
            except SandboxError as error:
                result = Result(Outcome.INFRASTRUCTURE, stderr=str(error).encode())
            finally:
                self._free.put_nowait(box)
            if result.outcome is not Outcome.INFRASTRUCTURE:
                break
            LOST.inc()
        return result
