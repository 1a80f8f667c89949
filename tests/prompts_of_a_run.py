"""The prompts of an asynchronous run that has ended, counted by the files that its components left."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import orjson

from services.protocol.prompts import Cursor

NOWHERE = 2**31 - 1
"""A position beyond all prompts."""


@dataclass(frozen=True)
class Account:
    """The numbers of prompts of a run that has ended."""

    taken: int
    """Given to a collector by the data-server."""
    doubled: int
    """Taken by two collectors, or a group twice."""
    left_out: int
    """Taken, and neither a group in the replay-buffer nor among what a collector has in flight."""


def account(run_dir: Path) -> Account:
    """Count the prompts of a run by the files that its components left.

    Raises:
        SystemExit: the run has begun its second epoch, in which positions come again.
    """
    records = [orjson.loads(path.read_bytes()) for path in run_dir.glob("collectors/*.json")]
    held = [position for record in records for _, position in record["open"]]
    with closing(sqlite3.connect(run_dir / "replay" / "replay-buffer.sqlite")) as replay:
        queued = [int(group_id.rpartition("-")[2]) for (group_id,) in replay.execute("SELECT group_id FROM known")]
    [data_file] = run_dir.glob("data/*/data-server.sqlite")
    with closing(sqlite3.connect(data_file)) as data:
        last = _cursor(data, "SELECT cursor FROM cursors WHERE consumer = 'collectors/train'")
        if last.epoch:
            raise SystemExit("error: the run began a second epoch; give it fewer steps")
        for record in records:
            if record["request_id"] is not None:
                # The reply was lost with the collector, which would ask for it again.
                start = _cursor(data, "SELECT cursor FROM answered WHERE request_id = ?", record["request_id"])
                held += range(start.position, start.position + record["size"]) if start.position < last.position else []
    doubled = len(held) - len(set(held)) + len(queued) - len(set(queued))
    return Account(last.position, doubled, len(set(range(last.position)) - set(queued) - set(held)))


def _cursor(data: sqlite3.Connection, query: str, *values: str) -> Cursor:
    """Return the cursor that a query finds; the end of all prompts if it finds none."""
    found = data.execute(query, values).fetchone()
    return Cursor.model_validate_json(found[0]) if found else Cursor(position=NOWHERE)
