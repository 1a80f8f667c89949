"""Finds groups in samples.jsonl, which grows without bound: an index of where each group lies, and a search over it.

The file has a line a completion, and the completions of a group stand together. Only what is shown is read again.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import orjson

from services.run_page.lines import Position, parse, read_lines

LINES_A_BLOCK = 4096
SEARCH_SECONDS = 0.5
"""How long one request searches before it says how far it has come."""

Spread = Literal["any", "mixed", "equal"]
"""Whether a group's rewards differ: only ``mixed`` groups teach anything."""


@dataclass(frozen=True)
class Query:
    """What to look for. ``before`` is the number of the group after the first to look at; None starts at the newest."""

    before: int | None = None
    limit: int = 10
    text: str = ""
    step_from: int | None = None
    step_to: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    """A group is found when a completion of it has a reward within these bounds, ends included."""
    spread: Spread = "any"


@dataclass(frozen=True)
class Found:
    """Groups, newest first; ``before`` continues the search, and is None when it has come to the beginning."""

    groups: list[dict[str, Any]]
    before: int | None
    searched_to_step: int | None
    total: int


class SampleIndex:
    """Where the groups of a file lie. May be used from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._position = Position()
        self._last: tuple[int, str] | None = None
        self._steps = array("q")
        self._starts = array("q")
        self._ends = array("q")
        # Lowest and highest reward; infinite the wrong way round where no completion could be scored.
        self._lows = array("d")
        self._highs = array("d")

    def refresh(self) -> None:
        """Takes in what was appended since the last call."""
        with self._lock:
            more = True
            while more:
                read = read_lines(self.path, self._position, LINES_A_BLOCK)
                if read.restarted:
                    self._forget()
                for line, start in zip(read.lines, read.offsets, strict=True):
                    self._take(line, start)
                self._position, more = read.end, read.more

    def _take(self, line: bytes, start: int) -> None:
        record = parse(line)
        if record is None:
            return
        key = (int(record["step"]), str(record.get("group_id")))
        if key != self._last:
            self._last = key
            self._steps.append(key[0])
            self._starts.append(start)
            self._ends.append(start)
            self._lows.append(math.inf)
            self._highs.append(-math.inf)
        self._ends[-1] = start + len(line)
        if (reward := record.get("reward")) is not None:
            self._lows[-1] = min(self._lows[-1], reward)
            self._highs[-1] = max(self._highs[-1], reward)

    def search(self, query: Query) -> Found:
        """The newest groups before ``query.before`` that it fits, after at most about SEARCH_SECONDS."""
        self.refresh()
        end = time.monotonic() + SEARCH_SECONDS
        total = len(self._steps)
        number = total if query.before is None else min(query.before, total)
        found: list[dict[str, Any]] = []
        if not self.path.exists():
            return Found([], None, None, 0)
        with self.path.open("rb") as file:
            while number > 0 and len(found) < query.limit and time.monotonic() < end:
                number -= 1
                if self._may_fit(number, query) and (group := self._read(file, number, query)) is not None:
                    found.append({"number": number, **group})
        step = self._steps[number] if number < total else None
        return Found(found, number if number > 0 else None, step, total)

    def _may_fit(self, number: int, query: Query) -> bool:
        step, low, high = self._steps[number], self._lows[number], self._highs[number]
        if query.step_from is not None and step < query.step_from:
            return False
        if query.step_to is not None and step > query.step_to:
            return False
        if query.spread != "any" and (query.spread == "mixed") != (low < high):
            return False
        return _overlap(low, high, query)

    def _read(self, file: IO[bytes], number: int, query: Query) -> dict[str, Any] | None:
        """The group, if it fits; None also when the file was replaced meanwhile, which the next refresh sees."""
        file.seek(self._starts[number])
        content = file.read(self._ends[number] - self._starts[number])
        needle = query.text.encode().lower()
        # As it stands in JSON; what is found here may be found in a key, so the fields are searched again.
        if needle and orjson.dumps(query.text)[1:-1].lower() not in content.lower():
            return None
        records = [record for line in content.splitlines() if (record := parse(line)) is not None]
        if not records or records[0]["step"] != self._steps[number]:
            return None
        if needle and not any(needle in text.encode().lower() for text in _texts(records)):
            return None
        rewards = [record["reward"] for record in records if record.get("reward") is not None]
        if not _is_unbounded(query) and not any(_overlap(reward, reward, query) for reward in rewards):
            return None
        first = records[0]
        shared = {name: first.get(name) for name in ("step", "group_id", "prompt", "rendered_prompt", "ground_truth")}
        completions = [{k: v for k, v in record.items() if k not in shared} for record in records]
        return {**shared, "completions": completions}


def _is_unbounded(query: Query) -> bool:
    return query.reward_from is None and query.reward_to is None


def _overlap(low: float, high: float, query: Query) -> bool:
    if _is_unbounded(query):
        return True
    lower = -math.inf if query.reward_from is None else query.reward_from
    upper = math.inf if query.reward_to is None else query.reward_to
    return low <= upper and high >= lower and low <= high


def _texts(records: list[dict[str, Any]]) -> Iterator[str]:
    first = records[0]
    yield from (str(first.get(name, "")) for name in ("prompt", "ground_truth", "group_id"))
    for record in records:
        result = record.get("result") or {}
        yield str(record.get("completion", ""))
        yield from (str(result[name]) for name in ("extracted", "reason") if result.get(name) is not None)
