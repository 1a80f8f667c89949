"""Signals that end an evaluation in order."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any


async def run_until_signal(work: Coroutine[Any, Any, object], told: str) -> int:
    """Run ``work`` until it ends, or until Ctrl-C, SIGTERM or a hang-up cancels it; return the exit code.

    ``told`` is a line for stderr, in which ``{}`` stands for the signal's name. Errors of ``work`` are raised.
    """
    task = asyncio.ensure_future(work)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
        print(told.format(received[0].name), file=sys.stderr)
        return 128 + received[0]
    return 0
