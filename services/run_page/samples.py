"""Search for groups in samples.jsonl and evaluations.jsonl, by an index of each group's place in the file.

These files grow without bound. They have a line a completion, and the completions of a group are adjacent. A search
reads only the groups that may match.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from services.run_page.lines import Position, parse, read_lines

LINES_A_BLOCK = 4096
SEARCH_SECONDS = 0.5
"""Longest search of one request; its reply says where to continue."""

Spread = Literal["any", "mixed", "equal"]
"""A group's rewards differ (``mixed``) or not (``equal``); only ``mixed`` groups have a gradient."""


class GroupsQuery(BaseModel):
    """A search for groups. Bounds are inclusive; ``before`` continues a search, None starts at the newest group.

    A group matches ``reward_from`` and ``reward_to`` if one of its completions has such a reward, ``prompt_key`` if its
    prompt has this key (see ``prompt_key``), and ``recurring`` if its prompt was sampled more than once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    before: int | None = Field(default=None, ge=0)
    limit: int = Field(default=10, ge=1, le=100)
    text: str = Field(default="", max_length=1000)
    step_from: int | None = None
    step_to: int | None = None
    reward_from: float | None = Field(default=None, allow_inf_nan=False)
    reward_to: float | None = Field(default=None, allow_inf_nan=False)
    spread: Spread = "any"
    prompt_key: str = Field(default="", pattern="^([0-9a-f]{16})?$")
    recurring: bool = False


@dataclass(frozen=True)
class GroupsFound:
    """Reply of GET /api/groups: groups, the newest first; ``before`` is null when the search is complete."""

    groups: list[dict[str, Any]]
    before: int | None
    searched_to_step: int | None
    total: int


def prompt_key(prompt: str) -> str:
    """Return a prompt's key, which stands for its text in queries."""
    return hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()


class SampleIndex:
    """An index of the groups of one file, for use from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._position = Position()
        self._last: tuple[int, str, int] | None = None
        self._steps = array("q")
        self._starts = array("q")
        self._ends = array("q")
        # Lowest and highest reward; +inf and -inf where no completion could be scored.
        self._lows = array("d")
        self._highs = array("d")
        # The prompts' keys, as numbers to save memory, and the number of groups of each prompt.
        self._prompts = array("Q")
        self._groups_of_prompt: Counter[int] = Counter()

    def refresh(self) -> None:
        """Index the lines that were appended since the last call."""
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
        prompt = int(prompt_key(str(record.get("prompt"))), 16)
        # Completions of evaluations have no group id; each has its own prompt.
        key = (int(record["step"]), str(record.get("group_id")), prompt)
        if key != self._last:
            self._last = key
            self._steps.append(key[0])
            self._starts.append(start)
            self._ends.append(start)
            self._lows.append(math.inf)
            self._highs.append(-math.inf)
            self._prompts.append(prompt)
            self._groups_of_prompt[prompt] += 1
        self._ends[-1] = start + len(line)
        if (reward := record.get("reward")) is not None:
            self._lows[-1] = min(self._lows[-1], reward)
            self._highs[-1] = max(self._highs[-1], reward)

    def search(self, query: GroupsQuery) -> GroupsFound:
        """Return the newest matching groups before ``query.before``; stop after about SEARCH_SECONDS."""
        self.refresh()
        end = time.monotonic() + SEARCH_SECONDS
        total = len(self._steps)
        number = total if query.before is None else min(query.before, total)
        found: list[dict[str, Any]] = []
        if not self.path.exists():
            return GroupsFound([], None, None, 0)
        with self.path.open("rb") as file:
            while number > 0 and len(found) < query.limit and time.monotonic() < end:
                number -= 1
                if self._may_match(number, query) and (group := self._read(file, number, query)) is not None:
                    count = self._groups_of_prompt[self._prompts[number]]
                    key = f"{self._prompts[number]:016x}"
                    found.append({"number": number, "prompt_key": key, "groups_of_prompt": count, **group})
        step = self._steps[number] if number < total else None
        return GroupsFound(found, number if number > 0 else None, step, total)

    def _may_match(self, number: int, query: GroupsQuery) -> bool:
        step, low, high = self._steps[number], self._lows[number], self._highs[number]
        if query.step_from is not None and step < query.step_from:
            return False
        if query.step_to is not None and step > query.step_to:
            return False
        if query.prompt_key and self._prompts[number] != int(query.prompt_key, 16):
            return False
        if query.recurring and self._groups_of_prompt[self._prompts[number]] < 2:
            return False
        if query.spread != "any" and (query.spread == "mixed") != (low < high):
            return False
        return _overlap(low, high, query)

    def _read(self, file: IO[bytes], number: int, query: GroupsQuery) -> dict[str, Any] | None:
        """Return the group if it matches; None also if the file was replaced, which the next refresh notices."""
        file.seek(self._starts[number])
        content = file.read(self._ends[number] - self._starts[number])
        needle = query.text.encode().lower()
        # A quick test on the JSON; since a match may be in a key, the fields are searched below.
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


def _is_unbounded(query: GroupsQuery) -> bool:
    return query.reward_from is None and query.reward_to is None


def _overlap(low: float, high: float, query: GroupsQuery) -> bool:
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
