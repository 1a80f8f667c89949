"""Runs the job group on the demo's questions and gives back what its steps say of themselves."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from local_runner import spec

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 3600.0
"""Longest that a command may take."""
POLL_SECONDS = 0.5

DEMO = spec.env_file(ROOT / "demo.env")
"""The demo's settings."""

QUESTIONS = {
    **{
        name: DEMO[name]
        for name in (
            "DATASET",
            "ARITHMETIC_DIGITS",
            "ARITHMETIC_OPERATIONS",
            "ARITHMETIC_TEMPLATE",
            "PROMPT_STYLE",
            "REWARD_FN",
            "TEMPERATURE",
        )
    },
    "NUM_EPOCHS": "1000",
    "EVAL_EVERY": "0",
    "EVAL_PROMPTS": "0",
    "CHECKPOINT_EVERY": "0",
    "REPLAY_GROUPS": "0",
    "KEEP_MEMORY": "true",
}
"""The demo's questions and reward, for all benchmarks of whole steps; replay, evaluation and checkpoints are off."""


Steps = list[dict[str, Any]]
"""The lines of metrics.jsonl of a run, from its first step."""


def run_job(
    job_group: str,
    settings: Mapping[str, object],
    num_nodes: Mapping[str, int],
    is_enough: Callable[[Steps], bool] = lambda _: False,
) -> Steps:
    """Runs a job group to its end, or until ``is_enough`` of its steps so far.

    Raises:
        SystemExit: it failed; the message is what it said.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "scripts.run_local", job_group, "--shared-dir", directory, "--run-id", "ours"]
        for task, count in num_nodes.items():
            command += ["--num-nodes", f"{task}={count}"]
        for name, value in settings.items():
            command += ["--env", f"{name}={value}"]
        metrics = Path(directory) / "runs/ours/metrics.jsonl"
        said = Path(directory) / "said.txt"
        end = time.monotonic() + SECONDS
        stopped = False
        with said.open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            while process.poll() is None and time.monotonic() < end:
                if not stopped and is_enough(_steps(metrics)):
                    process.send_signal(signal.SIGINT)
                    stopped = True
                time.sleep(POLL_SECONDS)
        finally:
            # Ends the job group; where it has ended there is nothing to end.
            process.terminate()
            process.wait()
        if process.returncode and not stopped:
            raise SystemExit(f"{said.read_text()[-3000:]}\nerror: {job_group} ended with {process.returncode}")
        return _steps(metrics)


def _steps(metrics: Path) -> Steps:
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
    # The last one may be half written.
    return [orjson.loads(line) for line in lines if line.endswith(b"\n")]


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a command.

    Raises:
        SystemExit: it failed; what it said on standard error was shown.
    """
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"error: {' '.join(command[:3])} took longer than {SECONDS:g} s") from None
        finally:
            process.kill()
    if process.returncode:
        raise SystemExit(f"error: {' '.join(command[:2])} ended with {process.returncode}")
    return output
