"""The process group of rank 0 and the rollout workers, with a thread of its own for its collectives.

A collective whose peer is lost may never return: NCCL forms its communicator within the first one, without a deadline.
So each group has a fresh daemon thread. When a call exceeds its deadline, the group is aborted and its thread left
behind, and the next publication begins with another group.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import torch.distributed as dist

from services.core.logs import get_logger
from services.weights.broadcast_group import leave_weights_group

log = get_logger(__name__)

T = TypeVar("T")

LEAVE_SECONDS = 10.0
"""Longest wait until a group is left, here and in a worker."""


class GroupBrokenError(Exception):
    """A collective that failed or did not end by its deadline; its group can no longer be used."""


class WorkerGroup:
    """A broadcast group. Its calls run one after the other in its own thread."""

    def __init__(self, name: str, registrations: dict[str, str]) -> None:
        """Start the group's thread.

        Args:
            name: the group's name, the same for all members.
            registrations: the router's id of each member, by its URL; a worker that restarted since has another id.
        """
        self.name = name
        self.registrations = registrations
        self.is_formed = False
        """True once a collective has ended, so that NCCL has its communicator."""
        self._process_group: dist.ProcessGroup | None = None
        self._is_left = False
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="broadcast", daemon=True).start()

    async def join(self, join: Callable[[], dist.ProcessGroup], seconds: float) -> None:
        """Join the process group.

        Raises:
            GroupBrokenError: the members did not meet within ``seconds``.
        """

        def enter() -> None:
            self._process_group = join()
            if self._is_left:  # The wait for this call was over before.
                leave_weights_group(self._process_group)

        await self._call(enter, seconds)

    async def send(self, send: Callable[[dist.ProcessGroup], None], seconds: float) -> None:
        """Run collectives.

        Raises:
            GroupBrokenError: one failed, or they did not end within ``seconds``.
        """
        group = self._process_group
        assert group is not None, "the group is joined"
        await self._call(lambda: send(group), seconds)
        self.is_formed = True

    async def leave(self) -> None:
        """Leave the group, and abort its collectives; wait LEAVE_SECONDS at most."""
        self._is_left = True
        self._tasks.put(None)
        group = self._process_group
        if group is None:
            return
        left: Future[None] = Future()
        # Not in the group's thread, which may be stuck; and gloo may wait for members that are gone.
        threading.Thread(target=_resolve, args=(left, lambda: leave_weights_group(group)), daemon=True).start()
        try:
            await asyncio.wait_for(asyncio.wrap_future(left), LEAVE_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            log.warning("broadcast group not left", group=self.name, reason=_reason(error))

    async def _call(self, work: Callable[[], T], seconds: float) -> T:
        done: Future[T] = Future()
        self._tasks.put(lambda: _resolve(done, work))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), seconds)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise GroupBrokenError(_reason(error, f"not ended within {seconds:g} s")) from error

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _resolve(future: Future[T], work: Callable[[], T]) -> None:
    """Run ``work`` and hand its result or error to a future, unless nobody waits for it any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  # raised again where the future is awaited
        future.set_exception(error)
    else:
        future.set_result(result)


def _reason(error: BaseException, timed_out: str = "timed out") -> str:
    text = str(error)
    return timed_out if isinstance(error, TimeoutError) and not text else text.splitlines()[0] if text else repr(error)
