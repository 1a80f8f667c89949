"""The JSON Lines files of a run directory: a reader, and a search for groups by an index of their places in the file.

Another process appends to the files, and a resumed run may replace them by shorter ones. samples.jsonl and
evaluations.jsonl have a line a completion, or a line a branch of an agent's episode; the lines of a group are adjacent.
A search reads only the groups that may match.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

RECORDS_A_REPLY = 1000
METRIC_DIGITS = 6
BLOCK_BYTES = 4 * 2**20
LINES_A_BLOCK = 4096
MAX_CHARACTERS = 100_000
"""Longer texts are cut in replies, with a note at their end."""
SEARCH_SECONDS = 0.5
"""Longest search of one request; its reply says where to continue."""


@dataclass(frozen=True)
class Position:
    """A reader's position: ``offset`` bytes into the file that ``file`` identifies."""

    file: str = ""
    offset: int = 0


@dataclass(frozen=True)
class Lines:
    """Complete lines after a position.

    ``restarted`` says that the file is not the position's file (a resumed run replaces it by its beginning), so that
    ``lines`` are the first of the new file. ``more`` says that further lines can be read now.
    """

    lines: list[bytes]
    offsets: list[int]
    """The offset of each line's first byte."""
    end: Position
    restarted: bool
    more: bool


def read_lines(path: Path, start: Position, limit: int | None = None) -> Lines:
    """Return the complete lines after ``start``; none while there is no file.

    Args:
        path: the file.
        start: the position to continue from.
        limit: the most lines, which then have at most about BLOCK_BYTES; None: all.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Lines([], [], Position(), restarted=bool(start.file), more=False)
    with file:
        status = os.fstat(file.fileno())
        identity = f"{status.st_dev:x}-{status.st_ino:x}"
        restarted = start.file not in ("", identity) or start.offset > status.st_size
        offset = 0 if restarted or not start.file else start.offset
        file.seek(offset)
        lines: list[bytes] = []
        offsets: list[int] = []
        spent = 0
        while limit is None or (len(lines) < limit and spent < BLOCK_BYTES):
            line = file.readline()
            if not line.endswith(b"\n"):
                break  # the end, or still being written
            lines.append(line)
            offsets.append(offset + spent)
            spent += len(line)
    end = Position(identity, offset + spent)
    is_full = limit is not None and (len(lines) == limit or spent >= BLOCK_BYTES)
    return Lines(lines, offsets, end, restarted, more=is_full and end.offset < status.st_size)


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None for a line that a crash left broken, which is not an object with a step."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int | float) else None


@dataclass(frozen=True)
class Metrics:
    """Metrics of some steps by column, with None where a step lacks one; also the reply of GET /api/metrics.

    ``file`` and ``offset`` are the position to continue from. ``restarted`` says that the file was replaced, so that
    earlier replies are obsolete; ``unreadable`` counts the lines that are not JSON.
    """

    file: str
    offset: int
    more: bool
    restarted: bool
    unreadable: int
    columns: dict[str, list[float | None]]
    reward_counts: list[list[tuple[float, int]] | None]
    """For each step, the number of completions by reward."""


def read_metrics(path: Path, start: Position) -> Metrics:
    """Return the metrics of up to RECORDS_A_REPLY steps of a metrics.jsonl after ``start``."""
    read = read_lines(path, start, RECORDS_A_REPLY)
    records = [record for line in read.lines if (record := parse(line)) is not None]
    names = dict.fromkeys(name for record in records for name in record)
    for no_column in ("reward_counts", "failures", "facts"):
        names.pop(no_column, None)
    return Metrics(
        file=read.end.file,
        offset=read.end.offset,
        more=read.more,
        restarted=read.restarted,
        unreadable=len(read.lines) - len(records),
        columns={name: [_number(record.get(name)) for record in records] for name in names},
        reward_counts=[_counts(record.get("reward_counts")) for record in records],
    )


def _number(value: Any) -> float | None:
    """Return a metric with METRIC_DIGITS digits, which keeps replies small; None if it is not a finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    # Times and byte counts are whole or need all their digits.
    if isinstance(value, int) or value.is_integer() or abs(value) >= 1e6:
        return value
    return float(f"{value:.{METRIC_DIGITS}g}")


def _counts(value: Any) -> list[tuple[float, int]] | None:
    """Return the number of completions by reward; None unless the value is a list of pairs of numbers."""
    if not isinstance(value, list):
        return None
    pairs: list[Any] = [v for v in value if isinstance(v, list) and len(v) == 2 and None not in map(_number, v)]
    return pairs


Spread = Literal["any", "mixed", "equal"]
"""A group's rewards differ (``mixed``) or not (``equal``); only ``mixed`` groups have a gradient."""


class GroupsQuery(BaseModel):
    """A search for groups. Bounds are inclusive; ``before`` continues a search, None starts at the newest group.

    A group matches ``reward_from`` and ``reward_to`` if one of its completions has such a reward, ``prompt_key`` if its
    prompt has this key (see ``prompt_key``), and ``recurring`` if its prompt was sampled more than once. Without
    ``tokens`` the ``spans`` of found completions are empty, because they are many times as large as all the rest.
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
    tokens: bool = False

    def admits(self, low: float, high: float) -> bool:
        """Return whether rewards from ``low`` to ``high`` overlap the bounds; without bounds every group matches."""
        lower, upper = self.reward_from, self.reward_to
        if lower is None and upper is None:
            return True
        return low <= high and (lower is None or lower <= high) and (upper is None or low <= upper)


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


@dataclass(slots=True)
class _Group:
    """The place of a group in its file, and the values by which a search selects groups."""

    step: int
    prompt_key: str
    start: int
    end: int
    low: float = math.inf
    """The lowest reward; infinite, with ``high`` = -inf, if no completion could be scored."""
    high: float = -math.inf


class SampleIndex:
    """An index of the groups of one file, for use from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._position = Position()
        self._last: tuple[int, str, str] | None = None
        self._groups: list[_Group] = []
        self._groups_of_prompt: Counter[str] = Counter()

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
        key = prompt_key(str(record.get("prompt")))
        # Completions of evaluations have no group id; each has its own prompt.
        identity = (int(record["step"]), str(record.get("group_id")), key)
        if identity != self._last:
            self._last = identity
            self._groups.append(_Group(identity[0], key, start, start))
            self._groups_of_prompt[key] += 1
        group = self._groups[-1]
        group.end = start + len(line)
        low, high = _rewards(record)
        group.low, group.high = min(group.low, low), max(group.high, high)

    def search(self, query: GroupsQuery) -> GroupsFound:
        """Return the newest matching groups before ``query.before``; stop after about SEARCH_SECONDS."""
        self.refresh()
        end = time.monotonic() + SEARCH_SECONDS
        groups = self._groups
        number = len(groups) if query.before is None else min(query.before, len(groups))
        matches: list[dict[str, Any]] = []
        size = 0
        if not self.path.exists():
            return GroupsFound([], None, None, 0)
        with self.path.open("rb") as file:
            while number > 0 and len(matches) < query.limit and size < BLOCK_BYTES and time.monotonic() < end:
                number -= 1
                group = groups[number]
                if self._may_match(group, query) and (content := _read(file, group, query)) is not None:
                    count = self._groups_of_prompt[group.prompt_key]
                    place = {"number": number, "prompt_key": group.prompt_key, "groups_of_prompt": count}
                    matches.append(place | content)
                    size += group.end - group.start
        step = groups[number].step if number < len(groups) else None
        return GroupsFound(matches, number if number > 0 else None, step, len(groups))

    def _may_match(self, group: _Group, query: GroupsQuery) -> bool:
        return (
            (query.step_from is None or group.step >= query.step_from)
            and (query.step_to is None or group.step <= query.step_to)
            and query.prompt_key in ("", group.prompt_key)
            and (not query.recurring or self._groups_of_prompt[group.prompt_key] > 1)
            and (query.spread == "any" or (query.spread == "mixed") == (group.low < group.high))
            and query.admits(group.low, group.high)
        )


def _read(file: IO[bytes], group: _Group, query: GroupsQuery) -> dict[str, Any] | None:
    """Return the group if it matches; None also if the file was replaced, which the next refresh notices."""
    file.seek(group.start)
    lines = file.read(group.end - group.start).splitlines()
    records = [record for line in lines if (record := parse(line)) is not None]
    if not records or records[0]["step"] != group.step:
        return None
    has_text = any(query.text.lower() in text.lower() for text in _texts(records))
    if not has_text or not any(query.admits(*_rewards(record)) for record in records):
        return None
    first = records[0]
    names = ("step", "group_id", "prompt", "rendered_prompt", "ground_truth", "row")
    shared = {name: first.get(name) for name in names}
    completions = [{k: v for k, v in record.items() if k not in shared} for record in records]
    if not query.tokens:
        completions = [c | ({"spans": []} if "spans" in c else {}) for c in completions]
    return {name: cut(value) for name, value in {**shared, "completions": completions}.items()}


def cut(value: Any) -> Any:
    """Return a text of at most MAX_CHARACTERS, or a JSON value with such texts."""
    if isinstance(value, dict):
        return {name: item if name == "spans" else cut(item) for name, item in value.items()}
    if isinstance(value, list):
        return [cut(item) for item in value]
    is_long = isinstance(value, str) and len(value) > MAX_CHARACTERS
    return f"{value[:MAX_CHARACTERS]}\n(… the rest is left out here)" if is_long else value


def _rewards(record: dict[str, Any]) -> tuple[float, float]:
    """Return the lowest and highest reward of one completion: its own twice, or an empty range without one."""
    reward = record.get("reward")
    return (reward, reward) if isinstance(reward, int | float) else (math.inf, -math.inf)


def _texts(records: list[dict[str, Any]]) -> Iterator[str]:
    first = records[0]
    yield from (str(first.get(name, "")) for name in ("prompt", "ground_truth", "group_id"))
    yield from (first.get("row") or {}).values()
    for record in records:
        result = record.get("result") or {}
        yield str(record.get("completion", ""))
        yield from (str(result[name]) for name in ("extracted", "reason") if result.get(name) is not None)
        for message in record.get("messages") or ():
            yield str(message.get("content", ""))
            yield from (f"{call['name']} {call.get('arguments', '')}" for call in message.get("tool_calls", ()))
