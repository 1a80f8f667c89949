"""The count of an asynchronous run's prompts, which tests of lost collectors rely on."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.prompts_of_a_run import account


@pytest.mark.parametrize(
    ("queued", "held", "asked", "found"),
    [
        ([0, 1, 2], [[3], [4]], None, (5, 0, 0)),
        ([0, 1, 2], [[3], []], 4, (5, 0, 0)),
        ([0, 1, 2], [[3], []], None, (5, 0, 1)),
        ([0, 1, 2, 4], [[3], [3]], None, (5, 1, 0)),
        ([0, 1, 1, 2, 4], [[3], []], None, (5, 1, 0)),
    ],
    ids=["all", "reply lost", "left out", "taken twice", "queued twice"],
)
def test_prompts_are_counted_by_what_a_run_leaves(
    tmp_path: Path, queued: list[int], held: list[list[int]], asked: int | None, found: tuple[int, int, int]
) -> None:
    """``held`` has the positions of two collectors in flight; the second has ``asked`` for one and lost the reply."""
    for directory in ("replay", "data/x", "collectors"):
        (tmp_path / directory).mkdir(parents=True)
    with closing(sqlite3.connect(tmp_path / "replay/replay-buffer.sqlite")) as replay:
        replay.execute("CREATE TABLE known (group_id TEXT)")
        replay.executemany("INSERT INTO known VALUES (?)", [(f"my-run-0-{position}",) for position in queued])
        replay.commit()
    with closing(sqlite3.connect(tmp_path / "data/x/data-server.sqlite")) as data:
        data.execute("CREATE TABLE cursors (consumer, cursor)")
        data.execute("""INSERT INTO cursors VALUES ('collectors/train', '{"position": 5}')""")
        data.execute("CREATE TABLE answered (request_id, cursor)")
        data.execute("""INSERT INTO answered VALUES ('r', '{"position": 4}')""")
        data.commit()
    for number, positions in enumerate(held):
        record = {"open": [[0, position] for position in positions], "size": 1}
        record["request_id"] = "r" if number and asked else None
        (tmp_path / f"collectors/{number}.json").write_text(json.dumps(record))
    counted = account(tmp_path)
    assert (counted.taken, counted.doubled, counted.left_out) == found
