"""Starts the local runner on small job groups of shell commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HEADER = "name: group\nexecution: parallel\nprimary_tasks: [ppo-trainer]\n"


def task(name: str, run: str, **fields: Any) -> str:
    """A task's YAML document."""
    document = {"name": name, **fields, "run": textwrap.dedent(run)}
    return "---\n" + json.dumps(document) + "\n"  # JSON is YAML


@dataclass
class Ended:
    """A run that has ended."""

    exit_code: int
    output: str
    run_dir: Path
    seconds: float

    def log(self, task: str, rank: int = 0) -> str:
        return (self.run_dir / "logs" / f"{task}-{rank}.log").read_text()

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "runner.json").read_text())


class Runner:
    """A runner in a directory of its own."""

    def __init__(self, directory: Path, *tasks: str, header: str = HEADER, arguments: tuple[str, ...] = ()) -> None:
        self.directory = directory
        (directory / "group.yaml").write_text(header + "".join(tasks))
        command = [sys.executable, "-m", "scripts.run_local", "group.yaml", "--run-id", "test", *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JOBGROUP_")}
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    @property
    def run_dir(self) -> Path:
        return self.directory / "runs" / "test"

    def wait_for(self, path: str, deadline: float = 120) -> Path:
        """Waits until a task has made the file ``path``."""
        end = time.monotonic() + deadline
        while not (self.directory / path).exists():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end, f"{path} did not appear"
            time.sleep(0.02)
        return self.directory / path

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, deadline: float = 200) -> Ended:
        output, _ = self.process.communicate(timeout=deadline)
        return Ended(self.process.returncode, output, self.run_dir, time.monotonic() - self.started)


def run(directory: Path, *tasks: str, **options: Any) -> Ended:
    """Runs a job group to its end."""
    return Runner(directory, *tasks, **options).end()


def busy() -> float:
    """How many times slower than an idle machine this one is now, by its load; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
