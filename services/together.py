"""Running several things at once, as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def run_together(*parts: Awaitable[None]) -> None:
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
