"""``grpo fetch``: a copy of a run's model, or of another directory of a run, on this machine.

The run is on the volume of a cluster, and a small pod that mounts the volume sends the files by rsync.

Files arrive in a hidden directory. It gets its name once rsync has found the checksum of every file equal to that on
the volume. After an interruption the same command continues.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from services.core.errors import ConfigurationError, DependencyLostError
from services.core.files import replace_directory
from services.run_page.directory import RUNS

POD = Path(__file__).with_suffix(".yaml")
MOUNT = "/shared/runs"
PROGRAMS = ("sky", "ssh", "rsync")
LAUNCH_OPTIONS = ("--yes", "--down", "--idle-minutes-to-autostop=30")
"""The pod goes half an hour after its last connection even when this command is killed."""


def main(
    run_id: Annotated[str, typer.Argument(metavar="RUN_ID", help="The run's id.")],
    what: Annotated[str, typer.Option(help="model, policy/v000012, checkpoints, or `.` for all of it.")] = "model",
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: runs/RUN_ID/WHAT.")] = None,
) -> None:
    """Copy what a run has made from a cluster's volume to this machine."""
    target = to or RUNS / run_id / what
    if target.exists():
        raise ConfigurationError(f"{target} is there already; remove it, or give another --to")
    partial = target.with_name(f".{target.resolve().name}.partial")
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        needed = f"fetching from a cluster needs {', '.join(PROGRAMS)}"
        raise ConfigurationError(f"{', '.join(missing)} not found on PATH; {needed}")
    partial.mkdir(parents=True, exist_ok=True)
    with pod(run_id) as host:
        source = f"{MOUNT}/{run_id}/{what}"
        check_readable(host, source)
        # Not --info=progress2, which macOS' own rsync does not have.
        run("rsync", "-rltc", "--partial", "--delete", "--progress", f"{host}:{source}/", f"{partial}/")
    count = sum(path.is_file() for path in partial.rglob("*"))
    if not count:
        raise ConfigurationError(f"{run_id} has no files in {what}; name another directory of the run with --what")
    replace_directory(partial, target)
    print(f"{target}: {count} files")


@contextmanager
def pod(run_id: str) -> Iterator[str]:
    """Launch the pod, and yield the host name that SkyPilot gives it in the SSH configuration; end it afterwards."""
    name = f"fetch-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"
    try:
        run("sky", "launch", "--cluster", name, *LAUNCH_OPTIONS, str(POD))
        yield name
    finally:
        # Neither what was copied nor an earlier error is lost with a pod that stays.
        if subprocess.run(["sky", "down", "--yes", name], check=False).returncode:
            print(f"the pod may still be there; end it by: sky down {name}", file=sys.stderr)


def check_readable(host: str, directory: str) -> None:
    """Check that the volume has a directory.

    Raises:
        ConfigurationError: it has none.
    """
    done = subprocess.run(["ssh", host, f"cd {shlex.quote(directory)}"], capture_output=True, text=True, check=False)
    if done.returncode:
        there = subprocess.run(["ssh", host, f"ls -t {MOUNT}"], capture_output=True, text=True, check=False)
        runs = f"the runs there, newest first: {', '.join(there.stdout.split()) or 'none'}"
        raise ConfigurationError(f"{directory} cannot be read on the volume: {done.stderr.strip()}; {runs}")


def run(*command: str) -> None:
    """Run a command in view.

    Raises:
        DependencyLostError: the command failed.
    """
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise DependencyLostError(f"{shlex.join(command)} ended with {done.returncode}; repeat the command to continue")
