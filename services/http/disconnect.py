"""Waiting for work on behalf of a client that may leave."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request


async def ended_before_client_left(request: Request, work: asyncio.Future[Any]) -> bool:
    """Wait until ``work`` ends or the client of ``request`` disconnects; return whether ``work`` has ended."""
    gone = asyncio.create_task(_disconnection(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    return work.done()


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
