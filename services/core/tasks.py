"""Helpers for asyncio: run awaitables until the first ends, and run blocking work in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def run_until_first_ends(*parts: Awaitable[None]) -> None:
    """Runs all of them until one ends; then cancels the others, waits for them, and raises the first error of any.

    Unlike asyncio.TaskGroup it ends with the first that ends, and its error is not wrapped in a group.
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
    """Runs blocking ``work`` in a thread that does not keep the process alive, so that a signal ends a long load."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # work's own result, None included

    def run_work() -> None:
        result, failure = None, None
        try:
            result = work()
        # Carried over to whoever awaits.
        except BaseException as error:  # noqa: BLE001
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run_work, name="in-background", daemon=True).start()
    return await future
