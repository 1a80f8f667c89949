"""The state of a run: one rule for ``scripts.status``, ``scripts.view``, ``scripts.logs`` and ``scripts.clean``."""

from __future__ import annotations

import time
from pathlib import Path

from local_runner.directory import OUTCOME, last_written, read_nodes, runner_of
from services.core.run_ids import UNDER_WAY_SECONDS
from services.run_page.directory import read_object

RUNNING = "running"
MAYBE = "may be under way"
"""The state of a run without a local runner, such as a cluster's, that wrote something not long ago."""
WITHOUT_SUMMARY = "ended without a summary"


def state_of(run_dir: Path) -> str:
    """Return the state of a run: ``running``, its outcome, MAYBE or WITHOUT_SUMMARY.

    A run with a live local runner is running, whatever earlier attempts left. Of another run its runner's record tells
    the outcome. Without a record the run is a cluster's, or its runner was killed. Then the trainer's summary tells the
    outcome if there is one; a trainer that resumes removes an earlier one.
    """
    try:
        if runner_of(run_dir, read_nodes(run_dir)) is not None:
            return RUNNING
        if outcome := read_object(run_dir / OUTCOME):
            ended = "failed" if outcome.get("failed") else "interrupted"
            return "succeeded" if outcome["exit_code"] == 0 else ended
        if status := read_object(run_dir / "summary.json").get("status"):
            return str(status)
        may_go_on = under_way(run_dir, last_written(run_dir)) is not None
    except (ValueError, TypeError, OSError) as error:  # damaged files, or a run that is being removed
        return f"unknown: {error}"
    return MAYBE if may_go_on else WITHOUT_SUMMARY


def under_way(run_dir: Path, written: float) -> str | None:
    """Return why the run is, or may be, under way; None when it is over.

    A local run is under way while its runner lives. A run of another machine or a cluster is over when nothing has been
    written for UNDER_WAY_SECONDS.

    Args:
        run_dir: the run.
        written: the time of the run's newest file.
    """
    nodes = read_nodes(run_dir)
    if (runner := runner_of(run_dir, nodes)) is not None:
        return runner
    ago = max(time.time() - written, 0.0)
    if (nodes is not None and nodes.is_here) or ago >= UNDER_WAY_SECONDS:
        return None
    where = f"machine {nodes.machine}" if nodes is not None else "a cluster or another machine"
    return (
        f"it may go on in {where}, since it was last written {ago / 60:.0f} minutes ago; "
        f"if it is over, remove it by hand: rm -r {run_dir}"
    )
