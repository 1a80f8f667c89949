"""Run directories: their names on a command line, and the runner, state and size of a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from local_runner.environment import Run
from services.core.errors import ConfigurationError
from services.core.files import atomic_write
from services.run_page.directory import read_object

FILE = "nodes.json"
LOCK = "runner.lock"
RUNS = Path("runs")
MARKS = (FILE, LOCK, "metrics.jsonl", "components")
"""A directory with any of these is a run's. config.json is not among them, because models have one, too."""
QUIET_SECONDS = 24 * 3600
"""A run without a runner on this machine may be under way elsewhere until nothing has been written for this long; a
step, or a wait for nodes, may take hours."""


@dataclass(frozen=True)
class Nodes:
    """A runner's process, and the addresses on which its nodes listen."""

    pid: int
    started: float
    endpoints: dict[str, str]
    """``host:port`` by ``{task}-{rank}:{port}``, as JOBGROUP_ENDPOINTS has it."""
    machine: str
    """The host name of the runner's machine."""

    @property
    def is_here(self) -> bool:
        """Return whether the runner was started on this machine, so that its process can be looked up."""
        return self.machine == socket.gethostname()

    def is_running(self) -> bool:
        """Return whether the runner still runs on this machine; its pid alone may be another process's by now."""
        try:
            return self.is_here and psutil.Process(self.pid).create_time() == self.started
        except psutil.NoSuchProcess:
            return False


def record_nodes(run: Run) -> None:
    """Write nodes.json, which says that this process runs ``run``, and on which addresses.

    Raises:
        ConfigurationError: the run directory cannot be written.
    """
    content = {
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "machine": socket.gethostname(),
        "endpoints": run.addresses.endpoints,
    }
    try:
        write_object(run.run_dir / FILE, content)
    except OSError as error:
        raise ConfigurationError(
            f"the run directory {run.run_dir} cannot be written: {error}; make room there"
        ) from error


def read_nodes(run_dir: Path) -> Nodes | None:
    """Return the content of nodes.json; None for a run that no local runner has run."""
    content = read_object(run_dir / FILE)
    return Nodes(**content) if content else None


def write_object(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object; the old file stays whole when the disk is full."""
    atomic_write(path, json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run directory's lock, as its runner does while it runs; on a shared volume it binds all machines.

    Raises:
        ConfigurationError: another process has the lock.
        OSError: the file system has no locks, or the file belongs to another user.
    """
    with (run_dir / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"{run_dir} is already running: its runner holds {LOCK}; end it or give another --run-id"
            ) from None
        yield


def under_way(run_dir: Path, written: float) -> str | None:
    """Return why the run is, or may be, under way; None when it is over.

    A local run is under way while its runner has the lock or its process lives. A run of another machine or a cluster
    is over when nothing has been written for QUIET_SECONDS.

    Args:
        run_dir: the run.
        written: the time of the run's newest file.
    """
    nodes = read_nodes(run_dir)
    if nodes is not None and nodes.is_running():
        return f"its runner is process {nodes.pid} of this machine"
    if (run_dir / LOCK).exists():
        try:
            with locked(run_dir):
                pass
        except ConfigurationError as error:
            return str(error)
        except OSError:
            pass  # a file system without locks, or another user's file: the other signs decide
    ago = max(time.time() - written, 0.0)
    if (nodes is not None and nodes.is_here) or ago >= QUIET_SECONDS:
        return None
    where = f"machine {nodes.machine}" if nodes is not None else "a cluster or another machine"
    return (
        f"it may go on in {where}, since it was last written {ago / 60:.0f} minutes ago; "
        f"if it is over, remove it by hand: rm -r {run_dir}"
    )


def state_of(run_dir: Path, nodes: Nodes | None) -> str:
    """Return ``running``, the outcome of the run, or ``unknown`` if neither runner nor trainer has recorded it."""
    if nodes is not None and nodes.is_running():
        return "running"
    status: str | None = read_object(run_dir / "summary.json").get("status")
    if status is None and nodes is not None:
        return "ended without a summary" if nodes.is_here else f"unknown: started on {nodes.machine}"
    return status or "unknown"


def usage(run_dir: Path) -> tuple[int, float]:
    """Return the disk space of a run in bytes, and the time of its newest file.

    A file with several links counts once, and symbolic links are not followed.
    """
    sizes: dict[tuple[int, int], int] = {}
    written = 0.0
    for parent, _, names in os.walk(run_dir):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile by a run that goes on
                status = os.lstat(os.path.join(parent, name))
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
                written = max(written, status.st_mtime)
    return sum(sizes.values()), written or run_dir.stat().st_mtime


def find_run(given: str | None, runs: Path = RUNS) -> Path:
    """Return the directory of a run, given by its id (a directory in ``runs``) or its directory; by default the newest.

    Raises:
        ConfigurationError: there is no such run.
    """
    found = next(iter(all_runs(runs)), None) if given is None else named_run(given, runs)
    if found is not None:
        return found
    if given is None:
        raise ConfigurationError(f"there is no run below {runs}/ here; name the run's directory")
    raise ConfigurationError(
        f"{given} is neither a run below {runs}/ here nor the directory of one; the newest below {runs}/: "
        f"{newest(runs)}"
    )


def find_directory(given: str) -> Path:
    """Return the directory of a run, as find_run does, or another directory that there is, such as one of runs.

    Raises:
        ConfigurationError: there is no such run or directory.
    """
    return Path(given) if named_run(given) is None and Path(given).is_dir() else find_run(given)


def newest(runs: Path = RUNS) -> str:
    """Return the names of the newest runs, for an error message."""
    return ", ".join(path.name for path in all_runs(runs)[:5]) or "none"


def named_run(given: str, runs: Path = RUNS) -> Path | None:
    """Return the directory of the run with the id or directory ``given``; None if there is none."""
    return next((path for path in (runs / given, Path(given)) if is_run(path)), None)


def is_run(path: Path) -> bool:
    """Return whether ``path`` is a run's directory."""
    return path.is_dir() and any((path / mark).exists() for mark in MARKS)


def all_runs(runs: Path = RUNS) -> list[Path]:
    """Return the runs in the directory ``runs``, the one last written to first."""
    return sorted(filter(is_run, runs.glob("*")), key=_last_written, reverse=True)


def _last_written(run_dir: Path) -> float:
    return max(path.stat().st_mtime for path in [run_dir, *run_dir.glob("*.json*"), *run_dir.glob("logs/*.log")])
