"""Run directories: their names on a command line, and the runner, state, error and size of a run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from local_runner.nodes import Run
from local_runner.supervisor import START_MARK
from services.core.errors import ConfigurationError
from services.core.files import read_from, read_object, write_json
from services.core.run_ids import UNDER_WAY_SECONDS, last_modified
from services.run_page.directory import is_run

FILE = "nodes.json"
LOCK = "runner.lock"
RUNS = Path("runs")
OUTCOME = "runner.json"
"""The file in which a local runner records how the run ended; it does not exist while the run runs."""
RUNNING = "running"
MAYBE = "may be under way"
"""The state of a run without a local runner, such as a cluster's, that wrote something not long ago."""
WITHOUT_SUMMARY = "ended without a summary"
LOG_END_BYTES = 2**18
"""The end of a node's log in which its last error is looked for."""


@dataclass(frozen=True)
class Nodes:
    """A runner's process, and the addresses on which its nodes listen."""

    pid: int
    started: float
    endpoints: dict[str, str]
    """``host:port`` by ``{task}-{rank}:{port}``, as JOBGROUP_ENDPOINTS has it."""
    machine: str
    """The host name of the runner's machine."""
    states: dict[str, str] = field(default_factory=dict)
    """The state of each node as the runner last knew it, by ``{task}-{rank}``."""
    mark: str = ""
    """The mark of the run's processes (``processes.MARK``)."""

    @property
    def is_here(self) -> bool:
        """Return whether the runner was started on this machine, so that its process can be looked up."""
        return self.machine == socket.gethostname()

    def is_running(self) -> bool:
        """Return whether the runner still runs on this machine; its pid alone may be another process's by now."""
        try:
            process = psutil.Process(self.pid)
            # A runner that has ended is a zombie until the program that started it asks for its exit code.
            is_alive = process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE
            return self.is_here and is_alive
        except psutil.NoSuchProcess:
            return False


def record_nodes(run: Run) -> None:
    """Write nodes.json, which says that this process runs ``run``, and on which addresses; remove an earlier outcome.

    Raises:
        ConfigurationError: the run directory cannot be written.
    """
    content = {
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "machine": socket.gethostname(),
        "endpoints": run.addresses.endpoints,
        "mark": run.mark,
    }
    with contextlib.suppress(OSError):  # such as a missing file; the run's end tells of one that cannot be written
        (run.run_dir / OUTCOME).unlink()
    try:
        write_json(run.run_dir / FILE, content)
    except OSError as error:
        raise ConfigurationError(
            f"the run directory {run.run_dir} cannot be written: {error}; make room there"
        ) from error


def record_states(run: Run, states: dict[str, str]) -> None:
    """Write the states of the run's nodes into nodes.json, unless it cannot be written."""
    with contextlib.suppress(OSError):
        write_json(run.run_dir / FILE, read_object(run.run_dir / FILE) | {"states": states})


def read_nodes(run_dir: Path) -> Nodes | None:
    """Return the content of nodes.json; None for a run that no local runner has run.

    Raises:
        DamagedFileError: it is not as this program writes it.
    """
    with read_from(run_dir / FILE):
        content = read_object(run_dir / FILE)
        return Nodes(**content) if content else None


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run directory's lock, as its runner does while it runs; on a shared volume it binds all machines.

    Raises:
        ConfigurationError: another process has the lock, the file system has no locks, or the file belongs to another
            user.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context((run_dir / LOCK).open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"{run_dir} is already running: its runner holds {LOCK}; end it or give another --run-id"
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"{run_dir} cannot be locked: {error}; needed is a directory of this user whose file system has locks"
            ) from error
        yield


def runner_of(run_dir: Path, nodes: Nodes | None) -> str | None:
    """Return the evidence that the run's local runner is alive; None without any.

    The runner holds the lock as long as it lives, also in another container. On a file system without locks only its
    process shows it.
    """
    if nodes is not None and nodes.is_running():
        return f"its runner is process {nodes.pid} of this machine"
    try:
        # Shared, so that no two readers take each other for the runner.
        with (run_dir / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"its runner holds {LOCK}"
    except OSError:
        pass  # no runner's file, no locks here, or another user's file
    return None


def usage(run_dir: Path) -> tuple[int, float]:
    """Return the disk space of a run in bytes, and the time of its newest file.

    A file with several links counts once, and symbolic links are not followed.
    """
    sizes: dict[tuple[int, int], int] = {}
    written = 0.0
    for parent, _, names in os.walk(run_dir):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile by a running run
                status = os.lstat(os.path.join(parent, name))
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
                written = max(written, status.st_mtime)
    return sum(sizes.values()), written or run_dir.stat().st_mtime


def find_run(name: str | None, runs: Path = RUNS) -> Path:
    """Return the directory of a run, given by its id (a directory in ``runs``) or its directory; by default the newest.

    Raises:
        ConfigurationError: there is no such run.
    """
    run = next(iter(all_runs(runs)), None) if name is None else named_run(name, runs)
    if run is not None:
        return run
    if name is None:
        raise ConfigurationError(f"there is no run below {runs}/ here; name the run's directory")
    raise ConfigurationError(
        f"{name} is neither a run below {runs}/ here nor the directory of one; the newest below {runs}/: {newest(runs)}"
    )


def find_directory(name: str) -> Path:
    """Return the directory of a run, as find_run does, or another directory that there is, such as one of runs.

    Raises:
        ConfigurationError: there is no such run or directory.
    """
    return Path(name) if named_run(name) is None and Path(name).is_dir() else find_run(name)


def newest(runs: Path = RUNS) -> str:
    """Return the names of the newest runs, for an error message."""
    return ", ".join(path.name for path in all_runs(runs)[:5]) or "none"


def named_run(name: str, runs: Path = RUNS) -> Path | None:
    """Return the directory of the run with the id or directory ``name``; None if it does not exist."""
    return next((path for path in (runs / name, Path(name)) if is_run(path)), None)


def all_runs(runs: Path = RUNS) -> list[Path]:
    """Return the runs in the directory ``runs``, the one last written to first."""
    return sorted(filter(is_run, runs.glob("*")), key=last_written, reverse=True)


def last_written(run_dir: Path) -> float:
    """Return the time of the newest of a run's own files and logs."""
    return last_modified(run_dir, [*run_dir.glob("*.json*"), *run_dir.glob("logs/*.log")])


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
        may_run = under_way(run_dir, last_written(run_dir)) is not None
    except (ValueError, TypeError, OSError) as error:  # damaged files, or a run that is being removed
        return f"unknown: {error}"
    return MAYBE if may_run else WITHOUT_SUMMARY


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
        f"it may still run in {where}, since it was last written {ago / 60:.0f} minutes ago; "
        f"if it is over, remove it by hand: rm -r {run_dir}"
    )


def shown_path(path: Path) -> str:
    """Return ``path`` relative to the current directory if it is below, else unchanged."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def grpo_command() -> str:
    """Return the beginning of a command line of this project: ``grpo``, or its path if PATH does not lead there."""
    program = Path(sys.argv[0]) if Path(sys.argv[0]).name == "grpo" else Path(sys.prefix) / "bin" / "grpo"
    return "grpo" if shutil.which("grpo") == str(program) else shown_path(program)
