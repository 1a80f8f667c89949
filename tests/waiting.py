"""Waits that follow progress instead of the clock, so that they hold on a machine that is busy with other work.

A wait fails once nothing has moved for ``IDLE_SECONDS``, and after ``LIMIT_SECONDS`` in any case. Both are many times
what anything in the tests takes, and less than the time-out of pytest itself (``pyproject.toml``), which says less.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from fastapi import FastAPI

T = TypeVar("T")

IDLE_SECONDS = 120.0
"""The longest time without progress; also the time-out of a single request, connection or answer."""
LIMIT_SECONDS = 540.0
"""The longest time of a wait; also the time-out of a command that runs to its end."""


class Deadline:
    """A limit to a wait, which starts anew whenever ``progress`` returns another value."""

    def __init__(
        self,
        what: str = "",
        *,
        progress: Callable[[], object] = lambda: None,
        told: Callable[[], object] = str,
        idle_seconds: float = IDLE_SECONDS,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        """Starts the time.

        Args:
            what: names the thing that is waited for in the error.
            progress: a value that changes while the thing is under way: the size of a log, a counter. It is asked for
                once a second.
            told: what else the error shows, such as the end of a log.
            idle_seconds: the longest time in which ``progress`` may stay the same.
            limit_seconds: the longest time in all.
        """
        self._what, self._progress, self._told = what, progress, told
        self._idle_seconds, self._limit_seconds = idle_seconds, limit_seconds
        self._started = self._moved = self._looked = time.monotonic()
        self._seen = progress()

    def check(self) -> None:
        """Fails when the time is over."""
        now = time.monotonic()
        if now - self._looked < 1:
            return
        self._looked = now
        if (seen := self._progress()) != self._seen:
            self._seen, self._moved = seen, now
        still, whole = now - self._moved, now - self._started
        if still > self._idle_seconds or whole > self._limit_seconds:
            what = self._what or "what was waited for"
            raise AssertionError(f"{what}: not within {whole:.0f} s, the last {still:.0f} of them idle\n{self._told()}")


def wait_until(condition: Callable[[], T], what: str = "", *, every: float = 0.05, **limits: Any) -> T:
    """Waits until ``condition`` returns something true, and returns it; ``limits`` are those of ``Deadline``."""
    deadline = Deadline(what, **limits)
    while not (found := condition()):
        deadline.check()
        time.sleep(every)
    return found


async def eventually(
    condition: Callable[[], T | Awaitable[T]], what: str = "", *, every: float = 0.02, **limits: Any
) -> T:
    """As ``wait_until``, on an event loop that runs on meanwhile."""
    deadline = Deadline(what, **limits)
    while True:
        answer = condition()
        found: T = await answer if isinstance(answer, Awaitable) else answer
        if found:
            return found
        deadline.check()
        await asyncio.sleep(every)


async def wait_ready(app: FastAPI) -> None:
    """Wait until a service's application is ready; raise the error if its start failed."""
    lifecycle = app.state.lifecycle
    await eventually(
        lambda: lifecycle.ready.is_set() or lifecycle.failure is not None,
        "the application is ready",
        idle_seconds=LIMIT_SECONDS,
    )
    if lifecycle.failure is not None:
        raise lifecycle.failure


async def stats_show(client: httpx.AsyncClient, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Waits until a service's statistics fulfil ``condition``, and returns them; their change is progress."""
    seen: dict[str, Any] = {}

    async def look() -> bool:
        seen.update((await client.get("/stats")).json())
        return condition(seen)

    await eventually(look, "statistics", progress=lambda: str(seen), told=lambda: seen)
    return seen


class LoopClock:
    """The clock of an event loop, which a test puts forward: deadlines pass at once, and never because it is slow.

    What has come to the loop before is seen only after the deadlines that have passed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop) -> None:
        """Replace the clock of ``loop`` until the test ends."""
        real, self._ahead = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: real() + self._ahead)

    def pass_by(self, seconds: float) -> None:
        """Put the clock forward."""
        self._ahead += seconds


def bytes_in(*paths: Path) -> int:
    """Return the size of files, and of all files below directories: a value that changes while logs are written."""
    # os.walk passes over what is renamed meanwhile.
    below = [Path(folder, name) for path in paths for folder, _, names in os.walk(path) for name in names]
    size = 0
    for file in [*paths, *below]:
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size if file.is_file() else 0
    return size
