"""The progress of a run in words: its present activity, and the steps of its metrics.jsonl.

Terminal, log, run page and ``grpo status`` all have it from here.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

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


@dataclass(frozen=True)
class Step:
    """The record of one step in metrics.jsonl."""

    step: int
    reward: float | None
    """The mean over completions; None if none could be scored."""
    loss: float | None
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase; ``step`` is the whole step."""
    trained_tokens: float | None = None
    """0 for a step whose rewards gave nothing to learn from."""
    reward_counts: Sequence[tuple[float, int]] = ()
    """The number of completions by reward."""
    by_source: dict[str, float] = field(default_factory=dict)
    """The mean reward of each source; empty without SOURCES."""
    failures: Sequence[tuple[str, int, str]] = ()
    """Completions without a reward or over a limit: reason, count, and what one of them says."""

    @classmethod
    def read(cls, line: bytes) -> Step:
        """Return the step of a line of metrics.jsonl."""
        record: dict[str, Any] = orjson.loads(line)
        return cls(
            step=int(record["step"]),
            reward=record.get("reward_mean"),
            loss=record.get("loss"),
            trained_tokens=record.get("trained_tokens"),
            reward_counts=[(reward, count) for reward, count in record.get("reward_counts", ())],
            failures=[(reason, count, message) for reason, count, message in record.get("failures", ())],
            by_source=of_sources(record, "reward_mean"),
            seconds={
                name.removeprefix("seconds_"): float(value)
                for name, value in record.items()
                if name.startswith("seconds_") and value is not None
            },
        )


def of_sources(record: Mapping[str, Any], column: str) -> dict[str, Any]:
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


def failed(steps: Sequence[Step]) -> str | None:
    """Return the share of completions that failed, with the reasons, such as ``4/8 (limit)``; None if none did."""
    reasons = _failures(steps)
    if not reasons:
        return None
    without_reward = sum(count for reason, count in reasons.items() if reason not in OVER_LIMIT)
    return f"{reasons.total()}/{_rewards(steps).total() + without_reward} ({counted(reasons)})"


def counted(reasons: Counter[str]) -> str:
    """Return the reasons with their counts, the most frequent first; a single reason alone."""
    return ", ".join(reason if len(reasons) == 1 else f"{reason} {count}" for reason, count in reasons.most_common())


def _rewards(steps: Sequence[Step]) -> Counter[float]:
    """Return the number of completions by reward."""
    return sum((Counter(dict(step.reward_counts)) for step in steps), Counter())


def _failures(steps: Sequence[Step]) -> Counter[str]:
    """Return the number of failed completions by reason."""
    return sum((Counter({reason: count for reason, count, _ in step.failures}) for step in steps), Counter())
