"""Runs of whole job groups under the local runner, and the steps in their metrics.jsonl."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks import harness
from benchmarks.harness import END_SECONDS, ROOT
from local_runner import spec
from local_runner.processes import MARK
from services.core.files import read_records
from services.run_page.directory import Run

JOB_GROUP = ROOT / "jobgroup.yaml"
RUN_ID = "benchmark"
RUN_SECONDS = 3600.0
"""Longest time that a run may take."""
POLL_SECONDS = 0.05

DEMO = spec.env_file(ROOT / "examples/demo.env")
"""The demo's settings."""

QUESTIONS = {
    name: value
    for name, value in DEMO.items()
    if name in ("DATASET", "PROMPT_STYLE", "REWARD_FN", "TEMPERATURE") or name.startswith("ARITHMETIC_")
} | {
    "NUM_EPOCHS": "1000",
    "EVAL_EVERY": "0",
    "EVAL_PROMPTS": "0",
    "CHECKPOINT_EVERY": "0",
    "REPLAY_GROUPS": "0",
    "KEEP_MEMORY": "true",
}
"""The demo's questions and reward, for all benchmarks of whole steps; replay, evaluation and checkpoints are off."""

Steps = list[dict[str, Any]]
"""The lines of a run's metrics.jsonl, from its first step."""


@dataclass(frozen=True)
class Job:
    """A job group that runs in the background."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    messages: Path
    """The file that the local runner writes its messages to."""

    def steps(self) -> Steps:
        """Return the steps so far."""
        return read_records(self.run_dir / "metrics.jsonl")

    def url(self, node: str, port: int) -> str | None:
        """Return the URL of a node's port; None before the local runner has given addresses."""
        nodes = Run(self.run_dir).nodes
        return f"http://{nodes.endpoints[f'{node}:{port}']}" if nodes else None

    def get(self, node: str, port: int, path: str) -> httpx.Response | None:
        """Return a node's reply to a GET request; None if the node does not answer with 200."""
        url = self.url(node, port)
        try:
            reply = httpx.get(f"{url}{path}", timeout=2, trust_env=False) if url else None
        except httpx.TransportError:
            return None
        return reply if reply is not None and reply.is_success else None

    def wait(self, is_enough: Callable[[], object], seconds: float = RUN_SECONDS) -> None:
        """Wait until ``is_enough`` returns something true, or the run has succeeded.

        Raises:
            SystemExit: the run failed or took longer; the message has the end of its messages.
        """
        end = time.monotonic() + seconds
        while not is_enough():
            code = self.process.poll()
            if code == 0:
                return
            if code is not None or time.monotonic() > end:
                why = f"not enough after {seconds:g} s" if code is None else f"the run ended with {code}"
                raise SystemExit(f"{self.messages.read_text('utf-8')[-3000:]}\nerror: {why}; its messages are above")
            time.sleep(POLL_SECONDS)


def kill(job: Job, node: str) -> None:
    """Kill the processes of a node, and wait until they are gone.

    Raises:
        SystemExit: the node has no such process.
    """
    killed = []
    for process in psutil.Process(job.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if process.environ().get(MARK, "").endswith(f"/{node}"):
                process.kill()
                killed.append(process)
    if not killed:
        raise SystemExit(f"error: {node} has no process to kill")
    psutil.wait_procs(killed, END_SECONDS)


def write_job_group(
    directory: Path,
    job_group: str,
    commands: Mapping[str, str],
    only: Sequence[str] = (),
    gpus: Mapping[str, int] | None = None,
) -> Path:
    """Write a copy of a job group, some of whose tasks run other commands, and return its path.

    With ``only`` the copy has no other tasks, and its first task is its primary. ``gpus`` gives a task's GPUs a node.
    """
    header, *tasks = yaml.safe_load_all((ROOT / job_group).read_text("utf-8"))
    if only:
        tasks = [task for task in tasks if task["name"] in only]
        header = {"name": "benchmark", "execution": "parallel", "primary_tasks": [tasks[0]["name"]]}
    for task in tasks:
        task["run"] = commands.get(task["name"], task["run"])
        if gpus and task["name"] in gpus:
            task["resources"]["accelerators"] = {"GPU": gpus[task["name"]]} if gpus[task["name"]] else None
    path = directory / "jobgroup.yaml"
    path.write_text(yaml.safe_dump_all([header, *tasks]))
    return path


@contextmanager
def running(
    directory: Path, job_group: Path, settings: Mapping[str, object], num_nodes: Mapping[str, int]
) -> Iterator[Job]:
    """Run a job group with ``directory`` as its volume; stop it when the context ends."""
    command = [sys.executable, "-m", "scripts.grpo", "run", str(job_group)]
    command += ["--shared-dir", str(directory), "--run-id", RUN_ID]
    for task, count in num_nodes.items():
        command += ["--num-nodes", f"{task}={count}"]
    for name, value in settings.items():
        command += ["--env", f"{name}={value}"]
    messages = directory / "messages.txt"
    with messages.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        yield Job(process, directory / "runs" / RUN_ID, messages)
    finally:
        harness.end(process)


def run_job(
    job_group: Path,
    settings: Mapping[str, object],
    num_nodes: Mapping[str, int],
    is_enough: Callable[[Steps], bool] = lambda _: False,
) -> Steps:
    """Run a job group to its end, or until its steps are enough, and return the steps."""
    with tempfile.TemporaryDirectory() as name, running(Path(name), job_group, settings, num_nodes) as job:
        job.wait(lambda: is_enough(job.steps()))
        return job.steps()
