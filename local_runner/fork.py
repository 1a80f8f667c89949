"""``grpo fork``: a new run from a checkpoint of another one, with the same state, whose only difference is a setting.

docs/guides/operating.md has examples.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from local_runner.launch import FILE, Launch, read_launch, recorded
from local_runner.run import check, planned, standard_output, start
from local_runner.supervisor import Outcome
from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.core.files import read_from, read_object, read_records, remove_directory, saved_steps, write_json
from services.core.run_ids import RUN_ID
from services.run_page.directory import FORK, MAYBE, RUNNING, Run, find_run


def main(
    run: Annotated[str, typer.Argument(help="Id or directory of the run.")],
    at: Annotated[int, typer.Option(min=1, help="The last step in common, which has a checkpoint.")],
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE that the new run has instead. Repeatable.")] = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the new run. Default: RUN-at-STEP.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, show the command, and write nothing.")] = False,
    prepare: Annotated[bool, typer.Option("--prepare", help="Write the new run directory, and start nothing.")] = False,
) -> None:
    """Start a new run from a step of another, with its weights, optimizer, data, buffer and random state."""
    console = Console(file=standard_output())
    fork = Fork(Run(find_run(run).path.resolve()), at, env or [], run_id)
    launched = fork.describe(console, is_prepared=prepare)
    if dry_run:
        return
    fork.write()
    if launched is not None and not prepare:
        raise typer.Exit(fork.train(*launched, console).exit_code)


class Fork:
    """A new run and the files that it takes over from another one."""

    def __init__(self, parent: Run, at: int, changes: list[str], run_id: str | None = None) -> None:
        """Choose a step, and name the new run.

        Args:
            parent: the other run.
            at: the last step that both have in common, of which there is a checkpoint.
            changes: NAME=VALUE of the settings that differ.
            run_id: the name of the new run; by default that of the other one with ``-at-<step>``.

        Raises:
            ConfigurationError: the name is not one of a run.
        """
        name = run_id or f"{parent.path.name}-at-{at}"
        if not re.fullmatch(RUN_ID, name):
            raise ConfigurationError(f"--run-id {name!r}: give 1 to 80 letters, digits, `.`, `_`, `-`, a letter first")
        self.run, self.parent, self.new, self.at = parent, parent.path, parent.path.with_name(name), at
        self.changes = changes
        self.saved = saved_steps(self.parent / "checkpoints")
        self.checkpoint = self.parent / "checkpoints" / f"step-{at:06d}"
        self.state = read_object(self.checkpoint / "state.json")

    def check(self) -> None:
        """Check that there is a checkpoint of the step, whose state can be told from what the run did later.

        Raises:
            ConfigurationError: there is none, or it cannot, or the new run exists already.
        """
        if self.new.exists():
            raise ConfigurationError(f"{self.new} exists; name the new run with --run-id")
        if self.parent.parent.name != "runs":
            raise ConfigurationError(f"{self.parent} is not in a directory `runs`, in which the new run could lie")
        if (state := self.run.state) in (RUNNING, MAYBE):
            raise ConfigurationError(f"{self.parent} {state}, and holds its replay buffer; fork it when it has ended")
        if self.at not in self.saved:
            there = f"{self.parent} has checkpoints of the steps {', '.join(map(str, self.saved)) or 'none'}"
            raise ConfigurationError(f"--at {self.at}: {there}; KEEP_CHECKPOINTS_EVERY keeps some to fork from")
        if self.run.settings(Task.REPLAY_BUFFER).get("replay_dir"):
            raise ConfigurationError("the run has REPLAY_DIR, which the new run would share; a fork copies RUN/replay")
        if self.is_ahead and self.at != max(self.saved):
            raise ConfigurationError(
                "with MODE=async, or a CURRICULUM by success rates, the data-server's state is that of the newest "
                f"checkpoint alone; fork the run there, --at {max(self.saved)}"
            )

    @property
    def is_ahead(self) -> bool:
        """True if the data-server's state is that of the run's end, and no checkpoint has an earlier one."""
        curriculum = self.run.settings(Task.DATA_SERVER).get("curriculum", "off")
        return self.run.settings(Task.TRAINER).get("mode") == "async" or curriculum == "balanced"

    def files(self) -> Iterator[tuple[Path, Callable[[Path, Path], object]]]:
        """Yield the files that the new run takes over whole, each with the function that copies or links it."""
        steps = [step for step in saved_steps(self.parent / "groups") if step <= self.at]
        recorded = [self.parent / "groups" / f"step-{step:06d}" for step in steps]
        yield from ((path, _link) for path in [*sorted(self.checkpoint.rglob("*")), *recorded] if path.is_file())
        folders = ["inputs", "tensorboard", "judge", *(["replay"] if self.state.get("replay_snapshot") else [])]
        folders += ["data", "collectors"] if self.is_ahead else []
        for path in [path for folder in folders for path in sorted((self.parent / folder).rglob("*"))]:
            if path.is_file() and not path.name.endswith(("-wal", "-shm", ".lock")):
                yield path, _copy_database if path.suffix == ".sqlite" else shutil.copyfile

    def describe(self, console: Console, *, is_prepared: bool = False) -> tuple[Launch, Path] | None:
        """Check the fork, print its command, and return the parent's command line and its directory.

        Raises:
            ConfigurationError: it cannot be made, or unless ``is_prepared``, `grpo run` did not start the parent.
        """
        self.check()
        launched = read_launch(self.parent)
        if launched is None and not is_prepared:
            remedy = f"give --prepare, and launch the job as before, with --env RUN_ID={self.new.name} and the changes"
            raise ConfigurationError(f"{self.parent} has no {FILE}, since `grpo run` did not start it; {remedy}")
        if launched is not None:
            launched = replace(launched[0], shared_dir=self.parent.parent.parent), launched[1]
            changed = [word for change in self.changes for word in ("--env", change)]
            command = shlex.join([*launched[0].again(self.new.name), *changed])
            console.print(command, soft_wrap=True, highlight=False, markup=False)
        return launched

    def write(self) -> None:
        """Write the new run directory under a hidden name, and rename it into place."""
        hidden = self.new.with_name(f".{self.new.name}.partial")
        remove_directory(hidden)
        for source, copy in self.files():
            target = hidden / source.relative_to(self.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            copy(source, target)
        for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
            lines = _lines(self.parent / name, self.at)
            (hidden / name).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
        record = {"parent": self.parent.name, "at": self.at, "changes": [*map(recorded, self.changes)]}
        write_json(hidden / FORK, record)
        hidden.rename(self.new)

    def train(self, launch: Launch, where: Path, console: Console) -> Outcome:
        """Train the new run to its end, in the directory in which the parent was started, and return the outcome.

        Args:
            launch: the parent's command line.
            where: the directory in which it was started.
            console: where the output of the run goes.

        Raises:
            ConfigurationError: a setting is wrong.
        """
        launch = launch.with_env(self.changes)
        with contextlib.chdir(where), planned(launch, self.new.name) as run:
            check(run, console)
            return start(run, launch, console)


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
