"""The default name of a run under SkyPilot: equal in all tasks of a job and after recoveries, and never used twice."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"
"""The pattern of a run's name, which is that of a directory and an argument of commands."""
UNDER_WAY_SECONDS = 24 * 3600
"""A run that has written nothing for this long is over. A step, or a wait for nodes, may take hours."""
ENDED = ("succeeded", "interrupted")
"""The states of summary.json with which a run is over; after a failure SkyPilot restarts the trainer."""


def default_run_id(shared_dir: Path) -> str:
    """Return ``{group}-{job}-{time}``, by the time at which SkyPilot's jobs controller took up the job.

    A restarted controller takes up its jobs again, and other tasks of the job may still run under the earlier name.
    So a run of the same group and job that is under way on the volume keeps its name. A replaced controller counts its
    jobs from 1, and its jobs get other names than those jobs of the earlier controller that have ended.

    Args:
        shared_dir: the volume.

    Returns:
        Outside SkyPilot the group's name, or ``local``.
    """
    job, group = parse_task_id(), os.environ.get("SKYPILOT_JOBGROUP_NAME", "local")
    if not job:
        return group
    name = f"{group}-{job['job']}"
    run_id = f"{name}-{datetime.strptime(job['time'], '%Y-%m-%d-%H-%M-%S-%f'):%Y%m%d-%H%M%S}"
    runs = shared_dir / "runs"
    if (runs / run_id).is_dir():
        return run_id
    latest = max(
        (path for path in runs.glob(f"{name}-*") if re.fullmatch(r"\d{8}-\d{6}", path.name[len(name) + 1 :])),
        default=None,
    )
    return latest.name if latest is not None and _is_under_way(latest) else run_id


def parse_task_id() -> dict[str, str] | None:
    """Return the managed job's number (``job``) and when its controller took it up (``time``); None without SkyPilot.

    A restarted jobs controller has another time, and a controller that was replaced counts jobs from 1 again.
    """
    # sky-managed-<time>_<group>_<task>_<job>-<task number>
    match = re.fullmatch(r"sky-managed-(?P<time>[^_]*)_.*?_(?P<job>\d+)-\d+", os.environ.get("SKYPILOT_TASK_ID", ""))
    return match.groupdict() if match else None


def job_id() -> str | None:
    """Return the managed job's number with its time, the same in all tasks of a job; None without SkyPilot."""
    job = parse_task_id()
    return f"{job['job']} of {job['time']}" if job else None


def _is_under_way(run_dir: Path) -> bool:
    try:
        summary = json.loads((run_dir / "summary.json").read_bytes())
    except (OSError, ValueError):
        summary = {}
    if summary.get("status") in ENDED:
        return bool(summary.get("job") == job_id())
    return time.time() - last_modified(run_dir, run_dir.glob("*")) < UNDER_WAY_SECONDS


def last_modified(run_dir: Path, files: Iterable[Path]) -> float:
    """Return the time at which a directory or one of its files was modified last; a running run replaces files."""
    times = [run_dir.stat().st_mtime]
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)
