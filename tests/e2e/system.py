"""Runs the whole job group with the tiny model, as a person would start it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from local_runner import processes
from services.core.endpoints import PROXY_VARIABLES
from services.core.files import read_records
from services.run_page.directory import Nodes, Run
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, bytes_in, wait_until

ROOT = Path(__file__).parents[2]

PROXIES = dict.fromkeys(PROXY_VARIABLES, "http://127.0.0.1:9")
"""A proxy that refuses: no run of the tests may need one, as all of it is on this machine."""

SETTINGS = {
    # Two trainer nodes cannot share a GPU.
    "CUDA_VISIBLE_DEVICES": "",
    "DATASET": "arithmetic",
    "DATASET_CONFIG": '{"template": "{a}{op}{b}="}',
    "PROMPT_STYLE": "plain",
    "REWARD_FN": "exact_match",
    "BATCH_SIZE": "8",
    "NUM_EPOCHS": "9",
    "GROUP_SIZE": "8",
    "MAX_NEW_TOKENS": "4",
    "MAX_PROMPT_TOKENS": "64",
    "LEARNING_RATE": "1e-4",
    "REPLAY_GROUPS": "2",
    "EVAL_PROMPTS": "20",
}


def one_each(*tasks: str) -> list[str]:
    """The options that give each of ``tasks`` one node."""
    return [option for task in tasks for option in ("--num-nodes", f"{task}=1")]


def grpo(*words: str | Path, code: int = 0) -> str:
    """Runs a command of `grpo` that must end with ``code``; returns what it printed, or its error."""
    command = [sys.executable, "-m", "scripts.grpo", *map(str, words)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


class System:
    """A run of a job group by the local runner, with its run directory below ``shared_dir``."""

    def __init__(
        self,
        shared_dir: Path,
        model: Path,
        *arguments: str,
        run_id: str = "",
        job_group: str = "jobgroup.yaml",
        secrets: Mapping[str, str] | None = None,
        **settings: str,
    ) -> None:
        secrets = secrets or {}
        run_id = run_id or f"run-{uuid.uuid4().hex[:12]}"
        self.run_dir = shared_dir / "runs" / run_id
        variables = SETTINGS | {"MODEL_NAME": str(model)} | settings
        options = [option for name, value in variables.items() for option in ("--env", f"{name}={value}")]
        options += [option for name in secrets for option in ("--secret", name)]
        self.output = shared_dir / f"output-{time.time_ns()}.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *[sys.executable, "-m", "scripts.grpo", "run", job_group],
                    *["--run-id", run_id, "--shared-dir", str(shared_dir), *options, *arguments],
                ],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | PROXIES | {"HF_HUB_OFFLINE": "1", **secrets},
            )

    def wait(self, limit_seconds: float = LIMIT_SECONDS) -> int:
        """Waits for the end and returns the exit code; lines in logs and files in the run directory are progress."""
        try:
            self._wait(lambda: self.process.poll() is not None, "the end of the run", limit_seconds)
        except AssertionError:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(IDLE_SECONDS)
            raise
        return self.process.returncode

    def wait_for_step(self, step: int) -> None:
        """Waits until the trainer has completed ``step``."""

        self.wait_until(lambda: any(record["step"] >= step for record in self.metrics()), f"step {step}")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until ``condition`` holds. The run must not end meanwhile."""

        def holds() -> bool:
            assert self.process.poll() is None, self.text
            return condition()

        self._wait(holds, what)

    def _wait(self, condition: Callable[[], bool], what: str, limit_seconds: float = LIMIT_SECONDS) -> None:
        progress = partial(bytes_in, self.output, self.run_dir)
        wait_until(condition, what, every=0.1, progress=progress, told=lambda: self.text, limit_seconds=limit_seconds)

    @property
    def text(self) -> str:
        """What the runner printed."""
        return self.output.read_text()

    def metrics(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl."""
        return read_records(self.run_dir / "metrics.jsonl")

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def log(self, node: str) -> str:
        return (self.run_dir / "logs" / f"{node}.log").read_text()

    def samples(self) -> list[dict[str, Any]]:
        """The lines of samples.jsonl."""
        return read_records(self.run_dir / "samples.jsonl")

    def verify(self) -> list[int]:
        """Has `grpo verify` compute steps again from the records; returns those that were equal to the bit: all."""
        steps: list[int] = []
        for line in grpo("verify", self.run_dir).splitlines():
            found = re.match(r"equal to the bit: .* of steps? (\d+)(?: to (\d+))? and the ", line)
            assert found is not None, line
            steps += range(int(found[1]), int(found[2] or found[1]) + 1)
        return steps

    @contextlib.contextmanager
    def held(self, node: str) -> Iterator[None]:
        """Within the context, the processes of ``node`` stand still."""
        held = self.processes_of(node)
        assert held, f"no process of {node}"
        for process in held:
            process.suspend()
        try:
            yield
        finally:
            for process in held:
                process.resume()

    def kill(self, node: str) -> None:
        """Kills all processes of ``node``, which the local runner starts again."""
        # A node's first process is its oldest. It dies first, so that it reports nothing of the others.
        for process in sorted(self.processes_of(node), key=psutil.Process.create_time):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """The processes of this run that are still there."""
        return processes.marked(self.nodes.mark)

    def processes_of(self, node: str) -> list[psutil.Process]:
        """The processes of ``node``, such as ``ppo-trainer-0``."""
        return processes.marked(f"{self.nodes.mark}/{node}")

    @property
    def nodes(self) -> Nodes:
        """The run's nodes, as the local runner recorded them at its start."""
        nodes = Run(self.run_dir).nodes
        assert nodes is not None
        return nodes
