"""Helpers for asyncio: run awaitables until the first ends, and run blocking work in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run_until_first_ends(*parts: Awaitable[object]) -> None:
    """Run all awaitables until one ends, then cancel the others, wait for them, and raise the first error of any.

    Unlike asyncio.TaskGroup, this does not wait for all of them, and it raises an error as it is, without a group.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def in_background(work: Callable[[], T]) -> T:
    """Run blocking ``work`` in a daemon thread and return its result.

    Python waits for the threads of asyncio.to_thread when it exits. It does not wait for a daemon thread, so a signal
    can end a long load.
    """
    done: Future[T] = Future()

    def run_work() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # raised where the result is awaited
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run_work, name="in-background", daemon=True).start()
    return await asyncio.wrap_future(done)
