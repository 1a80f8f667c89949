"""Runs the job group on the demo's questions and gives back what its steps say of themselves."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{a} {op} {b} = ? Answer with just the number."
SECONDS = 3600.0
"""Longest that a command may take."""

QUESTIONS = {
    "DATASET": "arithmetic",
    "ARITHMETIC_DIGITS": "1",
    "ARITHMETIC_OPERATIONS": "+",
    "ARITHMETIC_TEMPLATE": TEMPLATE,
    "REWARD_FN": "first_line_number",
    "TEMPERATURE": "1",
    "NUM_EPOCHS": "1000",
    "EVAL_EVERY": "0",
    "EVAL_PROMPTS": "0",
    "CHECKPOINT_EVERY": "0",
    "REPLAY_GROUPS": "0",
}
"""What all benchmarks of whole steps train on; nothing is measured of replay, evaluation and checkpoints."""


def run_job(job_group: str, settings: Mapping[str, object], num_nodes: Mapping[str, int]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run, from its first step."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "scripts.run_local", job_group, "--shared-dir", directory, "--run-id", "ours"]
        for task, count in num_nodes.items():
            command += ["--num-nodes", f"{task}={count}"]
        for name, value in {**QUESTIONS, **settings}.items():
            command += ["--env", f"{name}={value}"]
        run(command, cwd=ROOT)
        lines = (Path(directory) / "runs/ours/metrics.jsonl").read_bytes().splitlines()
    return [record for record in map(orjson.loads, lines) if record["step"] > 0]


def run(command: Sequence[str], cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a command.

    Raises:
        SystemExit: it failed; the message is what it said.
    """
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-3000:]
        raise SystemExit(f"{said}\nerror: {' '.join(command[:3])} ended with {done.returncode}")
    return done.stdout
