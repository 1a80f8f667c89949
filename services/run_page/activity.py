"""The present activity of a run, in words for its terminal, its log, its page and ``grpo status``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

REPORT_SECONDS = 10.0
"""The time between two reports of the same activity before the first step."""
REPORT_LATER_SECONDS = 60.0
"""The same time after the first step."""


class Activity:
    """The activity of a run: what it is, how much of it is done, since when and, for a wait, until when."""

    def __init__(self) -> None:
        self.begin("starting")

    def begin(self, what: str, done: Callable[[], str] = lambda: "", seconds: float | None = None) -> None:
        """Replace the activity.

        Args:
            what: such as ``waiting for 2 rollout workers``.
            done: returns how much of it is done, such as ``1 there``.
            seconds: the time after which the run gives up; None: no single deadline ends it.
        """
        self.what, self._done, self.since = what, done, time.time()
        self.until = None if seconds is None else self.since + seconds

    async def gather(self, works: Iterable[Awaitable[T]], what: str) -> list[T]:
        """Return the results of ``works`` in their order; meanwhile, report how many of them are done.

        Args:
            works: the works, which run at once.
            what: such as ``prompts answered``.
        """
        awaited = list(works)
        finished: list[None] = []
        self._done = lambda: f"{len(finished)} of {len(awaited)} {what}"

        async def one(work: Awaitable[T]) -> T:
            result = await work
            finished.append(None)
            return result

        return await asyncio.gather(*map(one, awaited))

    def shown(self) -> dict[str, Any]:
        """Return ``what``, ``done``, and ``since`` and ``until`` in seconds since 1970, as JSON has them."""
        return {"what": self.what, "done": self._done(), "since": self.since, "until": self.until}


def in_words(activity: Mapping[str, Any]) -> str:
    """Return what ``Activity.shown`` returned as text: what, how much is done, for how long, until when."""
    until = activity["until"]
    parts = [activity["what"], activity["done"], f"for {time.time() - activity['since']:.0f} s"]
    return ", ".join(
        [*filter(None, parts), *([time.strftime("until %H:%M:%S", time.localtime(until))] if until else [])]
    )


class ReportTimer:
    """Decides when to report an activity again."""

    def __init__(self) -> None:
        self._reported = 0.0

    def is_due(self, since: float, *, is_early: bool) -> bool:
        """Return whether to report an activity that began at ``since`` now; ``is_early`` before the first step."""
        now = time.time()
        is_due = now - max(since, self._reported) >= (REPORT_SECONDS if is_early else REPORT_LATER_SECONDS)
        self._reported = now if is_due else self._reported
        return is_due
