"""Run directories: the state, steps, outcome and files of a run, for commands, the run page, trainers and programs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.core.endpoints import Task
from services.core.errors import ConfigurationError, DamagedFileError
from services.core.files import read_from, read_object, saved_steps, write_json
from services.core.run_ids import UNDER_WAY_SECONDS, last_modified
from services.run_page.diagnosis import Diagnosis, Finding, History, question_key
from services.run_page.progress import Row
from services.run_page.records import MAX_CHARACTERS, Position, SampleIndex, cut, parse, read_lines

RUNS = Path("runs")
NODES, LOCK = "nodes.json", "runner.lock"
OUTCOME = "runner.json"
"""The file in which a local runner records how the run ended; it does not exist while the run runs."""
MARKS = (NODES, LOCK, "metrics.jsonl", "components")
"""A directory with any of these is a run's. config.json is not among them, because models have one, too."""
FORK = "fork.json"
"""The file of a run directory with the run that it was forked from."""
FIRST_FAILURE = "first_failure.txt"
"""The file of a run directory with the first failure of the user's own code: its reason, the error and its place."""
START_MARK = "=== "
"""The beginning of the line that a node's log has at every start."""
KEPT_LINES = 64
"""Lines of evaluations.jsonl that are compared with the training's prompts."""
LOG_END_BYTES = 2**18
"""The end of a node's log in which its last error is looked for."""

RUNNING = "running"
MAYBE = "may be under way"
"""The state of a run without a local runner, such as a cluster's, that wrote something not long ago."""
WITHOUT_SUMMARY = "ended without a summary"


@dataclass(frozen=True)
class Nodes:
    """A runner's process, and the addresses on which its nodes listen: the content of nodes.json."""

    pid: int
    started: float
    endpoints: dict[str, str]
    """``host:port`` by ``{task}-{rank}:{port}``, as JOBGROUP_ENDPOINTS has it."""
    machine: str = field(default_factory=socket.gethostname)
    """The host name of the runner's machine."""
    states: dict[str, str] = field(default_factory=dict)
    """The state of each node as the runner last knew it, by ``{task}-{rank}``."""
    mark: str = ""
    """The mark of the run's processes in their environment."""

    @property
    def is_here(self) -> bool:
        """Return whether the runner was started on this machine, so that its process can be looked up."""
        return self.machine == socket.gethostname()

    def is_running(self) -> bool:
        """Return whether the runner still runs on this machine; its pid alone may be another process's by now."""
        import psutil  # not above: nodes of a cluster, which have no local runner, do without it

        try:
            process = psutil.Process(self.pid)
            # A runner that has ended is a zombie until the program that started it asks for its exit code.
            is_alive = process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE
            return self.is_here and is_alive
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True)
class RunOverview:
    """A run with the records of all components, its state, such as ``running`` or ``succeeded``, and its outcome.

    ``written`` is the time of the last line of metrics.jsonl, in seconds since 1970; None before the first. ``damaged``
    says which files could not be read, and why; ``first_failure`` is the content of FIRST_FAILURE. ``fork`` is that of
    FORK: the parent's name, the step and the changed settings; empty for a run that is not a fork. ``error`` is
    None where there is nothing to say. ``findings`` are those of ``Run.findings``, each with its ``text``.
    """

    name: str
    path: str
    written: float | None
    components: dict[str, dict[str, Any]]
    summary: dict[str, Any]
    damaged: list[str]
    first_failure: str
    fork: dict[str, Any]
    state: str
    error: str | None
    findings: list[dict[str, Any]]


class Run:
    """A run, by its directory. Its files are read when they are asked for; the steps once each.

    Every attribute and method that reads a file raises DamagedFileError, which names the file, where the content is
    not that of a run; ``state`` says so instead.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        """Name the run by its directory, or by a name that distinguishes it from the other runs of a page."""
        self.path, self.name = path, name or path.name
        self.samples = SampleIndex(path / "samples.jsonl")
        """The groups that were trained on."""
        self.evaluations = SampleIndex(path / "evaluations.jsonl")
        """The greedy completions of held-out prompts, each a group of its own."""
        self._lock = threading.Lock()
        self._position = Position()
        self._diagnosis = Diagnosis(History())
        self._is_damaged = False
        """True if a line of metrics.jsonl is not the record of a step."""

    @property
    def nodes(self) -> Nodes | None:
        """The content of nodes.json; None for a run that no local runner has run."""
        with read_from(self.path / NODES):
            content = read_object(self.path / NODES)
            return Nodes(**content) if content else None

    @property
    def outcome(self) -> dict[str, Any]:
        """The end of the run as its local runner recorded it: exit_code, reason, seconds, restarts, failed."""
        return read_object(self.path / OUTCOME)

    @property
    def summary(self) -> dict[str, Any]:
        """The trainer's summary.json; empty until the trainer has written it."""
        return read_object(self.path / "summary.json")

    @property
    def components(self) -> dict[str, dict[str, Any]]:
        """The records of config.json by component: settings, commit, packages."""
        with read_from(self.path / "config.json"):
            components = dict(read_object(self.path / "config.json").get("components", {}))
            return {name: dict(record) for name, record in components.items()}

    def settings(self, component: str) -> dict[str, Any]:
        """Return a component's settings; empty if the run has none of them."""
        with read_from(self.path / "config.json"):
            return dict(self.components.get(component, {}).get("settings", {}))

    @property
    def runner(self) -> str | None:
        """The evidence that the run's local runner is alive; None without any.

        The runner holds the lock while it runs the run, also in another container. On a file system without locks only
        its process shows it, until it has recorded the outcome.
        """
        nodes = self.nodes
        if nodes is not None and nodes.is_running() and not (self.path / OUTCOME).exists():
            return f"its runner is process {nodes.pid} of this machine"
        try:
            # Shared, so that no two readers take each other for the runner.
            with (self.path / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"its runner holds {LOCK}"
        except OSError:
            pass  # no runner's file, no locks here, or another user's file
        return None

    @property
    def state(self) -> str:
        """The state of the run: ``running``, its outcome, MAYBE or WITHOUT_SUMMARY.

        A run with a live local runner is running, whatever earlier attempts left. Of another run its runner's record
        tells the outcome. Without a record the run is a cluster's, or its runner was killed. Then the trainer's summary
        tells the outcome if there is one; a trainer that resumes removes an earlier one.
        """
        try:
            if self.runner is not None:
                return RUNNING
            if outcome := self.outcome:
                ended = "failed" if outcome.get("failed") else "interrupted"
                return "succeeded" if outcome["exit_code"] == 0 else ended
            if status := self.summary.get("status"):
                return str(status)
            return WITHOUT_SUMMARY if self.under_way(self.last_written()) is None else MAYBE
        except (ValueError, LookupError, OSError) as error:  # damaged files, or a run that is being removed
            return f"unknown: {error}"

    @property
    def error(self) -> str | None:
        """The reason of a failure: the outcome, and the error of the node that failed; None without a failure.

        Without a record of a local runner, the trainer's summary tells it.
        """
        try:
            outcome, summary = self.outcome, self.summary
            if not outcome:
                return summary.get("error")
            if outcome["exit_code"] == 0 or (node := outcome.get("failed")) is None:
                return None
            error = self.last_error(node) or summary.get("error")
            reason = outcome.get("reason", f"{node} failed")
            return f"{reason}: {error.removeprefix('error: ')}" if error else f"{reason}; see logs/{node}.log"
        except (ValueError, LookupError, OSError):  # the state and the damage of the files say so
            return None

    def under_way(self, written: float) -> str | None:
        """Return why the run is, or may be, under way; None when it is over.

        A local run is under way while its runner lives. A run of another machine or a cluster is over when nothing has
        been written for UNDER_WAY_SECONDS. ``written`` is the time of its newest file.
        """
        if (runner := self.runner) is not None:
            return runner
        nodes, ago = self.nodes, max(time.time() - written, 0.0)
        if (nodes is not None and nodes.is_here) or ago >= UNDER_WAY_SECONDS:
            return None
        where = f"machine {nodes.machine}" if nodes is not None else "a cluster or another machine"
        may_run = f"it may still run in {where}, since it was last written {ago / 60:.0f} minutes ago"
        return f"{may_run}; if it is over, remove it by hand: rm -r {self.path}"

    def last_written(self) -> float:
        """Return the time of the newest of the run's own files and logs."""
        return last_modified(self.path, [*self.path.glob("*.json*"), *self.path.glob("logs/*.log")])

    def usage(self) -> tuple[int, float]:
        """Return the disk space of the run in bytes, and the time of its newest file.

        A file with several links counts once, and symbolic links are not followed.
        """
        sizes: dict[tuple[int, int], int] = {}
        written = 0.0
        for parent, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile by a running run
                    status = os.lstat(os.path.join(parent, name))
                    sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
                    written = max(written, status.st_mtime)
        return sum(sizes.values()), written or self.path.stat().st_mtime

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock, as its runner does while it runs; on a shared volume it binds all machines.

        Raises:
            ConfigurationError: another process has the lock, the file system has no locks, or the file belongs to
                another user.
        """
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context((self.path / LOCK).open("a"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = f"{self.path} is already running: its runner holds {LOCK}"
                raise ConfigurationError(f"{problem}; end it or give another --run-id") from None
            except OSError as error:
                needed = "a directory of this user on a file system with locks"
                raise ConfigurationError(f"{self.path} cannot be locked: {error}; needed is {needed}") from error
            yield

    def record_nodes(self, nodes: Nodes) -> None:
        """Write nodes.json, which says which process runs the run and where its nodes are; remove an earlier outcome.

        Raises:
            ConfigurationError: the run directory cannot be written.
        """
        with contextlib.suppress(OSError):  # such as a missing file; the run's end tells of one that cannot be written
            (self.path / OUTCOME).unlink()
        try:
            write_json(self.path / NODES, vars(nodes))
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be written: {error}; make room there") from error

    def record_states(self, states: Mapping[str, str]) -> None:
        """Write the states of the nodes into nodes.json, unless it cannot be written."""
        with contextlib.suppress(OSError):
            write_json(self.path / NODES, read_object(self.path / NODES) | {"states": states})

    def steps(self) -> list[Row]:
        """Return the records of metrics.jsonl; a resumed run may have fewer.

        Raises:
            DamagedFileError: a line is not the record of a step.
        """
        self.findings()
        if self._is_damaged:
            raise DamagedFileError(f"{self.path / 'metrics.jsonl'} is damaged: a line is not the record of a step")
        return [*self._diagnosis.history.rows]

    def findings(self, accuracy_before: float | None = None) -> list[Finding]:
        """Return what is wrong with the run; only the new lines of metrics.jsonl are judged.

        Args:
            accuracy_before: the lower end of the accuracy before the first step; None: that of the run's files.
        """
        with self._lock, read_from(self.path / "metrics.jsonl"):
            read = read_lines(self.path / "metrics.jsonl", self._position)
            if read.restarted:
                self._diagnosis, self._is_damaged = Diagnosis(History()), False
            history = self._diagnosis.history
            if read.lines:
                history.settings = history.settings or self.settings(Task.TRAINER)
                history.accuracy_before = self._accuracy_before() if accuracy_before is None else accuracy_before
                history.held_out = history.held_out or self.held_out()
            for row in map(parse, read.lines):
                if row is None:
                    self._is_damaged = True
                else:
                    self._diagnosis.add(row)
            self._position = read.end
            return self._diagnosis.findings()

    def _accuracy_before(self) -> float | None:
        """Return the lower end of the accuracy before the first step, of the summary or else the newest checkpoint."""
        steps = saved_steps(self.path / "checkpoints")
        states = [self.summary, *(read_object(self.path / f"checkpoints/step-{n:06d}/state.json") for n in steps[-1:])]
        return next((low for state in states if (low := state.get("accuracy_before_low")) is not None), None)

    def held_out(self) -> frozenset[str]:
        """Return the keys of the held-out prompts whose answers the first evaluation has kept."""
        rows = [*filter(None, map(parse, read_lines(self.path / "evaluations.jsonl", Position(), KEPT_LINES).lines))]
        first = [row for row in rows if row["step"] == rows[0]["step"]]
        return frozenset(question_key(str(row["prompt"]), str(row["ground_truth"])) for row in first)

    def logs(self) -> list[Path]:
        """Return the logs of the nodes that have started, in the order of their names."""
        return sorted((self.path / "logs").glob("*.log"))

    def log_end(self, node: str) -> list[str]:
        """Return the lines at the end of a node's log, since the node's last start."""
        log = self.path / "logs" / f"{node}.log"
        if not log.exists():
            return []
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_END_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        start = max((number for number, line in enumerate(lines) if line.startswith(START_MARK)), default=-1)
        return lines[start + 1 :]

    def last_error(self, node: str) -> str | None:
        """Return the line in which a node named the error that ended it; None if its last start logged none."""
        return next((line for line in reversed(self.log_end(node)) if line.startswith("error: ")), None)

    def first_failure(self, since: float = 0.0) -> str:
        """Return the run's first failure of the user's own code; empty without one since that time."""
        path = self.path / FIRST_FAILURE
        try:
            if path.stat().st_mtime < since:
                return ""
            with path.open(errors="replace") as file:
                return str(cut(file.read(MAX_CHARACTERS + 1))).strip()
        except OSError:
            return ""

    def overview(self, state: str | None = None, *, is_alone: bool = True) -> RunOverview:
        """Return what a page shows of the run; a damaged file counts as empty and is named.

        Args:
            state: the state of a run whose own process asks; None: that of its files.
            is_alone: whether the page shows this run alone, with its findings, for which all steps are read.
        """
        damaged: list[str] = []

        def read(name: str, content: Callable[[], Any]) -> Any:
            try:
                return content()
            except (ValueError, OSError) as error:
                damaged.append(f"{name} cannot be read: {str(error).removeprefix(f'{self.path / name} ')}")
                return None

        try:
            found = self.findings() if is_alone else []
        except (ValueError, OSError):  # the page counts the lines that cannot be read
            found = []
        return RunOverview(
            name=self.name,
            path=str(self.path),
            written=self._written(),
            components=read("config.json", lambda: self.components) or {},
            summary=read("summary.json", lambda: self.summary) or {},
            damaged=damaged,
            first_failure=self.first_failure(),
            fork=read(FORK, lambda: read_object(self.path / FORK)) or {},
            state=state or self.state,
            error=self.error,
            findings=[vars(finding) | {"text": str(finding)} for finding in found],
        )

    def _written(self) -> float | None:
        try:
            return (self.path / "metrics.jsonl").stat().st_mtime
        except OSError:
            return None


def is_run(path: Path) -> bool:
    """Return whether ``path`` is a run's directory, also of a run that failed before its first step."""
    return path.is_dir() and any((path / mark).exists() for mark in MARKS)


def named_run(name: str, runs: Path = RUNS) -> Run | None:
    """Return the run with the id or directory ``name``; None if it does not exist."""
    return next((Run(path) for path in (runs / name, Path(name)) if is_run(path)), None)


def all_runs(runs: Path = RUNS) -> list[Run]:
    """Return the runs in the directory ``runs``, the one last written to first."""
    return sorted(map(Run, filter(is_run, runs.glob("*"))), key=Run.last_written, reverse=True)


def newest(runs: Path = RUNS) -> str:
    """Return the names of the newest runs, for an error message."""
    return ", ".join(run.name for run in all_runs(runs)[:5]) or "none"


def find_run(name: str | None, runs: Path = RUNS) -> Run:
    """Return a run, given by its id (a directory in ``runs``) or its directory; by default the newest.

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


def find_runs(names: Sequence[str]) -> list[Run]:
    """Return runs, each once and under a name of its own; a name is that of a run, or of a directory of runs.

    Raises:
        ConfigurationError: a name is of neither.
    """
    paths: list[Path] = []
    for name in names:
        within = [] if named_run(name) is not None or not Path(name).is_dir() else filter(is_run, Path(name).iterdir())
        paths += sorted(within) or [find_run(name).path]
    unique = list(dict.fromkeys(path.resolve() for path in paths))
    return [Run(path, _shortest_name(path, unique)) for path in unique]


def _shortest_name(path: Path, among: list[Path]) -> str:
    """Return the run's id, with as many of its parent directories as distinguish it from runs of the same id."""
    others = [other for other in among if other != path]
    lengths = range(1, len(path.parts) + 1)
    parts = next(path.parts[-n:] for n in lengths if all(path.parts[-n:] != other.parts[-n:] for other in others))
    return str(Path(*parts))
