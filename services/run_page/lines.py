"""A reader of JSON Lines files that another process appends to, and that a resumed run may replace by a shorter one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

BLOCK_BYTES = 4 * 2**20


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


def read_lines(path: Path, start: Position, limit: int) -> Lines:
    """Return up to ``limit`` complete lines after ``start``; none while the file does not exist."""
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
        while len(lines) < limit and spent < BLOCK_BYTES:
            line = file.readline()
            if not line.endswith(b"\n"):
                break  # the end, or still being written
            lines.append(line)
            offsets.append(offset + spent)
            spent += len(line)
    end = Position(identity, offset + spent)
    is_full = len(lines) == limit or spent >= BLOCK_BYTES
    return Lines(lines, offsets, end, restarted, more=is_full and end.offset < status.st_size)


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None for a line that a crash left broken, which is no object with a step."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int | float) else None
