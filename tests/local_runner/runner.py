"""Starts the local runner on small job groups of shell commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import LIMIT_SECONDS, bytes_in, wait_until

PATIENT = """
import sys
from local_runner import supervisor
from scripts import grpo
supervisor.PRIMARY_STOP_SECONDS = {seconds}
sys.argv.insert(1, "run")
grpo.main()
"""
OUTPUT = "output.txt"
"""The file with what the runner prints."""
HEADER = "name: group\nexecution: parallel\nprimary_tasks: [ppo-trainer]\n"


def task(name: str, run: str, **fields: Any) -> str:
    """Return a task's YAML document."""
    document = {"name": name, **fields, "run": textwrap.dedent(run)}
    return "---\n" + json.dumps(document) + "\n"  # JSON is YAML


@dataclass
class Ended:
    """A run that has ended."""

    exit_code: int
    output: str
    run_dir: Path

    def log(self, task: str, rank: int = 0) -> str:
        return (self.run_dir / "logs" / f"{task}-{rank}.log").read_text()

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "runner.json").read_text())


class Runner:
    """A runner in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        *tasks: str,
        arguments: tuple[str, ...] = (),
        stop_seconds: float | None = None,
    ) -> None:
        """Start a runner; ``stop_seconds``, if given, is the time that it gives primary tasks to end."""
        self.directory = directory
        (directory / "group.yaml").write_text(HEADER + "".join(tasks))
        start = ["-m", "scripts.grpo", "run"] if stop_seconds is None else ["-c", PATIENT.format(seconds=stop_seconds)]
        command = [sys.executable, *start, "group.yaml", "--run-id", "test", *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JOBGROUP_")}
        with (directory / OUTPUT).open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def run_dir(self) -> Path:
        return self.directory / "runs" / "test"

    @property
    def output(self) -> str:
        """Return the runner's output so far."""
        return (self.directory / OUTPUT).read_text()

    def wait_for(self, path: str) -> Path:
        """Wait until a task has made the file ``path``."""

        def is_made() -> bool:
            assert self.process.poll() is None, self.output
            return (self.directory / path).exists()

        wait_until(is_made, path, progress=lambda: bytes_in(self.directory))
        return self.directory / path

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> Ended:
        self.process.wait(timeout=LIMIT_SECONDS)
        return Ended(self.process.returncode, self.output, self.run_dir)


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
