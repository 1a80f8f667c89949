"""The progress of a run in words: its present activity, and the steps of its metrics.jsonl.

Terminal, log, run page and ``grpo status`` all have it from here.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

REPORT_SECONDS = 10.0
"""The time between two reports of the same activity before the first step."""
REPORT_LATER_SECONDS = 60.0
"""The same time after the first step."""

AVERAGED_STEPS = 3
"""Most steps at the start and at the end over which rewards are averaged."""

OVER_LIMIT = frozenset({"limit", "timeout", "reward_over_limit"})
"""Reasons of failure whose completions are wrong answers; the others have no reward."""


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
    until, seconds = activity["until"], time.time() - activity["since"]
    end = time.strftime("until %H:%M:%S", time.localtime(until)) if until else ""
    return ", ".join(filter(None, (activity["what"], activity["done"], f"for {seconds:.0f} s", end)))


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


Row = Mapping[str, Any]
"""The record of a step in metrics.jsonl."""


def phases(row: Row) -> dict[str, float]:
    """Return a step's seconds by phase; ``step`` is the whole step."""
    names = [name for name, value in row.items() if name.startswith("seconds_") and value is not None]
    return {name.removeprefix("seconds_"): row[name] for name in names}


def of_sources(record: Row, column: str) -> dict[str, Any]:
    """Return what a record of metrics has of a column for each source, by the source's name."""
    start = f"{column}/"
    return {name.removeprefix(start): value for name, value in record.items() if name.startswith(start)}


def first_and_last(rewards: Sequence[float]) -> dict[str, float | int | None]:
    """Return the mean rewards of the first and of the last steps, and the number of steps that each averages.

    No step is in both means. A single step has a first mean only; without steps there is none.
    """
    steps = max(min(AVERAGED_STEPS, len(rewards) // 2), 1)
    return {
        "reward_first": statistics.fmean(rewards[:steps]) if rewards else None,
        "reward_last": statistics.fmean(rewards[-steps:]) if len(rewards) > 1 else None,
        "reward_steps": min(steps, len(rewards)),
    }


def rewards(rows: Iterable[Row]) -> Counter[float]:
    """Return the number of completions by reward."""
    return sum((Counter(dict(map(tuple, row.get("reward_counts", ())))) for row in rows), Counter())


def failures(rows: Iterable[Row]) -> Counter[str]:
    """Return the number of completions without a reward or over a limit, by reason."""
    listed = [(reason, count) for row in rows for reason, count, _ in row.get("failures", ())]
    return sum((Counter({reason: count}) for reason, count in listed), Counter())


def completions(rows: Sequence[Row]) -> int:
    """Return the number of completions, those without a reward included."""
    without_reward = [count for reason, count in failures(rows).items() if reason not in OVER_LIMIT]
    return rewards(rows).total() + sum(without_reward)


def failed(rows: Sequence[Row]) -> str | None:
    """Return the share of completions that failed, with the reasons, such as ``4/8 (limit)``; None if none did."""
    reasons = failures(rows)
    return f"{reasons.total()}/{completions(rows)} ({counted(reasons)})" if reasons else None


def counted(reasons: Counter[str]) -> str:
    """Return the reasons with their counts, the most frequent first; a single reason alone."""
    return ", ".join(reason if len(reasons) == 1 else f"{reason} {count}" for reason, count in reasons.most_common())
