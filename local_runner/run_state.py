"""The state of a run and why it failed: one rule for ``scripts.status``, ``view``, ``logs`` and ``clean``."""

from __future__ import annotations

import time
from pathlib import Path

from local_runner.directory import OUTCOME, last_written, read_nodes, runner_of
from local_runner.supervisor import START_MARK
from services.core.run_ids import UNDER_WAY_SECONDS
from services.run_page.directory import read_object

RUNNING = "running"
MAYBE = "may be under way"
"""The state of a run without a local runner, such as a cluster's, that wrote something not long ago."""
WITHOUT_SUMMARY = "ended without a summary"
LOG_END_BYTES = 2**18
"""The end of a node's log in which its last error is looked for."""


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


def error_of(run_dir: Path) -> str | None:
    """Return why a run failed: the outcome, and the error of the node that failed; None for a run that did not fail.

    Without a record of a local runner, the trainer's summary tells it.
    """
    try:
        outcome, summary = read_object(run_dir / OUTCOME), read_object(run_dir / "summary.json")
        if not outcome:
            return summary.get("error")
        if outcome["exit_code"] == 0 or (node := outcome.get("failed")) is None:
            return None
        error = last_error(run_dir / "logs" / f"{node}.log") or summary.get("error")
        reason = outcome.get("reason", f"{node} failed")
        return f"{reason}: {error.removeprefix('error: ')}" if error else f"{reason}; see logs/{node}.log"
    except (ValueError, KeyError, OSError):  # the state and the damage of the files say so
        return None


def lines_since_start(log: Path) -> list[str]:
    """Return the lines at the end of a node's log, since the node's last start."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_END_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    start = max((number for number, line in enumerate(lines) if line.startswith(START_MARK)), default=-1)
    return lines[start + 1 :]


def last_error(log: Path) -> str | None:
    """Return the line in which a node named the error that ended it; None if its last start logged none."""
    return next((line for line in reversed(lines_since_start(log)) if line.startswith("error: ")), None)


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
