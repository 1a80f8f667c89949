"""Waiting for work on behalf of a client that may leave."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.types import Receive


async def ended_before_client_left(request: Request, work: asyncio.Future[Any]) -> bool:
    """Wait until ``work`` ends or the client of ``request`` disconnects; return whether ``work`` has ended."""
    gone = asyncio.create_task(_disconnection(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    return work.done()


def has_left(receive: Receive) -> bool:
    """Return at once whether the client of a request, whose body was received, has closed its connection."""
    coming = receive()
    try:
        # Runs until it would wait. To wait in a task, and cancel that, would take several turns of the event loop.
        coming.send(None)  # type: ignore[attr-defined]
    except StopIteration as came:
        return bool(came.value["type"] == "http.disconnect")
    finally:
        coming.close()  # type: ignore[attr-defined]
    return False


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
