"""``grpo fork``: a new run from a step of another one, with the same state, whose only difference is a setting.

docs/guides/forking.md has examples.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.filesize import decimal

from local_runner import directory
from local_runner.processes import running
from local_runner.spec import env_files
from local_runner.summary import Launch
from local_runner.view import duration
from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.core.files import read_from, read_object, read_records, remove_directory, saved_steps, write_json
from services.core.run_ids import RUN_ID
from services.core.settings import SECRET
from services.run_page.directory import CHANGES, FORK

LAUNCH = "launch.json"
"""The file of a run directory with the command line that started the run."""
POLL_SECONDS = 0.5


def main(
    run: Annotated[str, typer.Argument(help="Id or directory of the run.")],
    at: Annotated[int, typer.Option(min=1, help="The last step that both runs have in common.")],
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE that the new run has instead. Repeatable.")] = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the new run. Default: RUN-at-STEP.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show disk, cost and command; write nothing.")] = False,
    prepare: Annotated[bool, typer.Option("--prepare", help="Write the new run directory, and start nothing.")] = False,
    below: Annotated[Path, typer.Option("--runs", metavar="DIR", help="The directory of runs.")] = directory.RUNS,
    by_program: Annotated[bool, typer.Option("--by-program", hidden=True, help="As that of `grpo run`.")] = False,
) -> None:
    """Start a new run from a step of another, with its weights, optimizer, data, buffer and random state."""
    parent = directory.find_run(run, below).resolve()
    changes, launch = env or [], read_launch(parent)
    changed = [word for change in changes for word in ("--env", change)]
    name = run_id or f"{parent.name}-at-{at}"
    if not re.fullmatch(RUN_ID, name):
        raise ConfigurationError(f"--run-id {name!r}: allowed are 80 letters, digits, `.`, `_` and `-`, a letter first")
    fork = Fork(parent, parent.with_name(name), at)
    fork.check()
    print(fork.disk())
    is_whole = fork.start == at
    if not is_whole:
        print(fork.cost())
    if launch is None and not (prepare and is_whole):
        raise ConfigurationError(
            f"{parent} has no {LAUNCH}, since `grpo run` did not start it. Give --prepare and a step that has a "
            f"checkpoint, and launch the job as before, with --env RUN_ID={fork.new.name} and the changed settings"
        )
    if prepare and not is_whole:
        other = f"give --at {fork.start}, or " if fork.start else ""
        raise ConfigurationError(
            f"--prepare writes a run that goes on from a checkpoint, and {parent} has none of step {at}; {other}leave "
            "--prepare out"
        )
    command = [] if launch is None else replace(launch, shared_dir=parent.parent.parent).again(fork.new.name)
    print("\n" + shlex.join([*command, *changed]))
    if dry_run:
        return
    fork.write(changes)
    if launch is None or prepare:
        return
    command += ["--by-program"] if by_program else []
    where = Path(read_object(parent / LAUNCH)["directory"])
    if not is_whole:
        fork.train_up_to(command, where)
    # The run takes this process, so that Ctrl-C reaches it alone, and its exit code is this command's.
    sys.stdout.flush()
    os.chdir(where)
    os.execv(sys.executable, in_this_python([*command, *changed]))


@dataclass(frozen=True)
class Part:
    """A file of the new run: its size, and what writes it. A link takes no room of its own."""

    path: Path
    size: int
    write: Callable[[Path], object]
    is_link: bool = False


class Fork:
    """A new run and the files that it takes over from another one."""

    def __init__(self, parent: Path, new: Path, at: int) -> None:
        """Choose the checkpoint to begin from: that of step ``at``, or the newest one before it; 0 without any."""
        self.parent, self.new, self.at = parent, new, at
        saved = saved_steps(parent / "checkpoints")
        self.start = max((step for step in saved if step <= at), default=0)
        self.newest = max(saved, default=0)
        self.checkpoint = parent / "checkpoints" / f"step-{self.start:06d}"
        self.state = read_object(self.checkpoint / "state.json")
        self.lines = _lines(parent / "metrics.jsonl", at)

    def check(self) -> None:
        """Check that the state of the step can be told from what the run did later.

        Raises:
            ConfigurationError: it cannot, or the new run exists already.
        """
        if self.new.exists():
            raise ConfigurationError(f"{self.new} exists; name the new run with --run-id")
        if self.parent.parent.name != "runs":
            raise ConfigurationError(f"{self.parent} is not in a directory `runs`, in which the new run could lie")
        if (state := directory.state_of(self.parent)) in (directory.RUNNING, directory.MAYBE):
            raise ConfigurationError(f"{self.parent} {state}, and holds its replay buffer; fork it when it has ended")
        if not self.lines or self.lines[-1]["step"] < self.at:
            last = self.lines[-1]["step"] if self.lines else 0
            raise ConfigurationError(f"--at {self.at}: {self.parent} has {last} steps")
        settings = {task: self._settings(task) for task in (Task.TRAINER, Task.DATA_SERVER, Task.REPLAY_BUFFER)}
        if settings[Task.REPLAY_BUFFER].get("replay_dir"):
            raise ConfigurationError("the run has REPLAY_DIR, which the new run would share; a fork copies RUN/replay")
        if self.is_ahead and self.start != self.newest:
            raise ConfigurationError(
                f"with MODE=async, or a CURRICULUM by success rates, the data-server's state goes beyond step "
                f"{self.start}: collectors, or the order of the next epoch, know later answers. Fork the run at its "
                f"newest checkpoint, --at {self.newest}"
            )

    @property
    def is_ahead(self) -> bool:
        """True if the data-server's state is that of the run's end, and no checkpoint has an earlier one."""
        curriculum = self._settings(Task.DATA_SERVER).get("curriculum", "off")
        return self._settings(Task.TRAINER).get("mode") == "async" or curriculum == "balanced"

    def _settings(self, task: Task) -> dict[str, Any]:
        with read_from(self.parent / "config.json"):
            record = read_object(self.parent / "config.json").get("components", {}).get(task.value, {})
            settings: dict[str, Any] = dict(record.get("settings", {}))
            return settings

    def parts(self) -> Iterator[Part]:
        """Yield the files that the new run takes over: all that a run resumes from, and its records up to the start.

        Settings that changed up to the fork's step hold in the steps that are run again, too.
        """
        if changes := _lines(self.parent / CHANGES, self.at):
            yield _part(CHANGES, changes)
        if not self.start:
            return
        steps = [step for step in saved_steps(self.parent / "groups") if step <= self.start]
        recorded = [self.parent / "groups" / f"step-{step:06d}" for step in steps]
        for path in [*sorted(self.checkpoint.rglob("*")), *recorded]:
            if path.is_file():
                yield Part(path.relative_to(self.parent), path.stat().st_size, partial(_link, path), is_link=True)
        for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
            yield _part(name, _lines(self.parent / name, self.start))
        folders = ["inputs", "tensorboard", "judge", *(["replay"] if self.state.get("replay_snapshot") else [])]
        folders += ["data", "collectors"] if self.is_ahead else []
        for path in [path for folder in folders for path in sorted((self.parent / folder).rglob("*"))]:
            if path.is_file() and not path.name.endswith(("-wal", "-shm", ".lock")):
                copy = _copy_database if path.suffix == ".sqlite" else shutil.copyfile
                yield Part(path.relative_to(self.parent), path.stat().st_size, partial(copy, path))

    def disk(self) -> str:
        """Return a sentence with the disk that the new run takes at first.

        Raises:
            ConfigurationError: there is not as much.
        """
        parts = [*self.parts()]
        # A file system that has no hard links gets copies.
        links, copies = (sum(part.size for part in parts if part.is_link is kind) for kind in (True, False))
        free = shutil.disk_usage(self.parent).free
        if copies > free:
            raise ConfigurationError(f"the fork takes {decimal(copies)}, and {decimal(free)} are free; make room")
        return (
            f"{self.new.name} takes {decimal(copies)} of disk, and shares {decimal(links)} of checkpoint and records "
            f"with {self.parent.name}; {decimal(free)} are free"
        )

    def cost(self) -> str:
        """Return a sentence with the steps that are to be computed again, and their time."""
        again = [line for line in self.lines if line["step"] > self.start]
        seconds = sum(line.get("seconds_step", 0.0) for line in again)
        before = f"checkpoint step-{self.start:06d}" if self.start else "the beginning"
        return (
            f"there is no checkpoint of step {self.at}: steps {self.start + 1} to {self.at} are run again from "
            f"{before} with the run's own settings, in about {duration(seconds)}; KEEP_CHECKPOINTS_EVERY keeps "
            "checkpoints to fork from"
        )

    def write(self, changes: list[str]) -> None:
        """Write the new run directory under a hidden name, and rename it into place."""
        hidden = self.new.with_name(f".{self.new.name}.partial")
        remove_directory(hidden)
        for part in self.parts():
            (hidden / part.path).parent.mkdir(parents=True, exist_ok=True)
            part.write(hidden / part.path)
        hidden.mkdir(exist_ok=True)
        self._replace(hidden / CHANGES, {change.partition("=")[0].lower() for change in changes})
        write_json(hidden / FORK, {"parent": self.parent.name, "at": self.at, "changes": [*map(_recorded, changes)]})
        hidden.rename(self.new)

    def _replace(self, record: Path, names: set[str]) -> None:
        """Have the settings in ``names`` that had changed while the parent ran return to their values at the start."""
        lines = _lines(record, self.at)
        if resets := sorted(names.intersection(name for line in lines for name in line["values"])):
            end = {"step": self.at + 1, "request": f"fork of {self.parent.name}", "values": {}, "launched": {}}
            _part(CHANGES, [*lines, end | {"resets": resets}]).write(record)

    def train_up_to(self, command: list[str], where: Path) -> None:
        """Run the new run with the old settings until it has a checkpoint of the step, from which it is to go on.

        Raises:
            ConfigurationError: it ended before.
        """
        settings = ["--env", f"CHECKPOINT_EVERY={self.at}", "--env", "CHECKPOINTS_KEPT=9"]
        wanted = self.new / "checkpoints" / f"step-{self.at:06d}"
        with running(in_this_python([*command, *settings]), cwd=where) as process:
            while process.poll() is None and not wanted.exists():
                time.sleep(POLL_SECONDS)
        if not wanted.exists():
            raise ConfigurationError(f"{self.new} ended before step {self.at}; see its logs")
        for step in saved_steps(self.new / "checkpoints"):
            if step > self.at:
                remove_directory(self.new / "checkpoints" / f"step-{step:06d}")


def record_launch(run_dir: Path, launch: Launch) -> None:
    """Write launch.json, from which ``grpo fork`` starts the run again; values of secrets are left out."""
    content = {
        "directory": os.getcwd(),
        "job_group": str(launch.job_group),
        "env": [*map(_recorded, launch.env)],
        "env_files": [str(path) for path in launch.env_files],
        "in_files": _open(launch.in_files),
        "secrets": [*launch.secrets],
        "num_nodes": [*launch.num_nodes],
        "small": launch.small,
    }
    write_json(run_dir / LAUNCH, content)


def _recorded(assignment: str) -> str:
    """Return an option of --env with its value, which may be in the environment; the name alone of a secret.

    A fork takes secrets from its own environment.
    """
    name, given, _ = assignment.partition("=")
    if SECRET.search(name):
        return name
    return assignment if given else f"{name}={os.environ.get(name, '')}"


def read_launch(run_dir: Path) -> Launch | None:
    """Return the command line that started a run; None where the run does not say.

    Raises:
        ConfigurationError: a file of variables has others now.
    """
    with read_from(run_dir / LAUNCH):
        content = read_object(run_dir / LAUNCH)
        if not content:
            return None
        where, files = Path(content.pop("directory")), [Path(path) for path in content.pop("env_files")]
        # A file that is not there is this project's, as it was for the run.
        read = [where / path if (where / path).exists() else path for path in files]
        if _open(env_files(read)) != content["in_files"]:
            raise ConfigurationError(
                f"{', '.join(map(str, files))} in {where} has other variables than when {run_dir.name} was started; "
                "restore it, so that the fork differs in --env alone"
            )
        return Launch(Path(content.pop("job_group")), env_files=files, **content)


def _open(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not secret."""
    return {name: value for name, value in variables.items() if not SECRET.search(name)}


def _part(name: str, lines: list[dict[str, Any]]) -> Part:
    content = b"".join(orjson.dumps(line) + b"\n" for line in lines)
    return Part(Path(name), len(content), lambda path: path.write_bytes(content))


def in_this_python(command: list[str]) -> list[str]:
    """Return a command line of this project as one of this interpreter, whatever PATH has."""
    return [sys.executable, "-m", "scripts.grpo", *command[1:]]


def _lines(path: Path, last: int) -> list[dict[str, Any]]:
    """Return the records of a file up to a step."""
    with read_from(path):
        return [line for line in read_records(path) if line["step"] <= last]


def _link(source: Path, target: Path) -> None:
    """Make a second name of a file that nobody writes to; copy it where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _copy_database(source: Path, target: Path) -> None:
    """Copy a SQLite file with what its write-ahead log has."""
    with read_from(source), closing(sqlite3.connect(source)) as database, closing(sqlite3.connect(target)) as copy:
        database.backup(copy)
