"""Waiting for what a service comes to by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx


async def eventually(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 20) -> None:
    """Returns once ``condition`` holds; fails when it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    holds = False
    while not holds:
        assert time.monotonic() < deadline, "it did not come to that"
        found = condition()
        holds = await found if isinstance(found, Awaitable) else found
        if not holds:
            await asyncio.sleep(0.02)


async def stats_show(client: httpx.AsyncClient, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The service's statistics once they fulfil ``condition``."""
    seen: dict[str, Any] = {}

    async def look() -> bool:
        seen.update((await client.get("/stats")).json())
        return condition(seen)

    await eventually(look)
    return seen
