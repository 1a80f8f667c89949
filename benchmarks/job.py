"""Runs of `grpo run` on this machine, and the steps in their metrics.jsonl."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from local_runner import skypilot
from local_runner.processes import MARK
from services.core.files import read_records
from services.core.processes import end_all

ROOT = Path(__file__).resolve().parents[1]
RUN_ID = "benchmark"
RUN_SECONDS = 3600.0
"""Longest time that a run may take."""
END_SECONDS = 60.0
"""Time for a program to stop its own child processes after SIGTERM."""
POLL_SECONDS = 0.05


def say(line: str) -> None:
    """Write a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def end_in_order() -> None:
    """Let SIGTERM raise SystemExit, so that a benchmark stops the programs that it started."""

    def leave(number: int, _frame: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


@dataclass(frozen=True)
class Job:
    """A job group that runs in the background."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    messages: Path
    """The file of the runner's messages."""

    def steps(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl so far."""
        return read_records(self.run_dir / "metrics.jsonl")

    def wait(self, is_enough: Callable[[], object] = lambda: False) -> None:
        """Wait until ``is_enough`` returns something true, or the run has succeeded.

        Raises:
            SystemExit: the run failed or took longer than RUN_SECONDS; the message has the end of its messages.
        """
        deadline = time.monotonic() + RUN_SECONDS
        while not is_enough():
            code = self.process.poll()
            if code == 0:
                return
            if code is not None or time.monotonic() > deadline:
                why = f"the run took longer than {RUN_SECONDS:g} s" if code is None else f"the run ended with {code}"
                raise SystemExit(f"{self.messages.read_text('utf-8')[-3000:]}\nerror: {why}; its messages are above")
            time.sleep(POLL_SECONDS)

    def kill_trainer(self) -> None:
        """Kill the trainer's processes with SIGKILL."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if process.environ().get(MARK, "").endswith("/ppo-trainer-0"):
                    process.kill()


@contextmanager
def running(
    directory: Path,
    settings: Mapping[str, object],
    job_group: str = "jobgroup.yaml",
    nodes: Mapping[str, int] | None = None,
) -> Iterator[Job]:
    """Run a job group with ``directory`` as its volume; stop it when the context ends.

    Args:
        directory: an empty directory.
        settings: variables of every task.
        job_group: the job group's file, in the repository's root.
        nodes: how many nodes a task has, where it is not one.
    """
    command = [sys.executable, "-m", "scripts.grpo", "run", str(ROOT / job_group), "--small"]
    command += ["--shared-dir", str(directory), "--run-id", RUN_ID]
    for task, count in (nodes or {}).items():
        command += ["--num-nodes", f"{task}={count}"]
    for name, value in settings.items():
        command += ["--env", f"{name}={value}"]
    messages = directory / "messages.txt"
    with messages.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        yield Job(process, directory / "runs" / RUN_ID, messages)
    finally:
        end_all([process], END_SECONDS)


def with_gpus(directory: Path, job_group: str, gpus: Mapping[str, int]) -> str:
    """Write a copy of a job group whose tasks have other numbers of GPUs a node, and return its path."""
    changes = {(task, "resources.accelerators"): f"GPU:{n}" if n else "null" for task, n in gpus.items()}
    path = directory / "jobgroup.yaml"
    path.write_text(skypilot.edited((ROOT / job_group).read_text("utf-8"), changes))
    return str(path)
