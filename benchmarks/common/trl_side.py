"""TRL's side of the benchmarks of whole steps."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from benchmarks.common import harness
from benchmarks.common.harness import ROOT
from benchmarks.common.job import QUESTIONS, RUN_SECONDS
from benchmarks.common.job import Steps as JobSteps
from local_runner.environment import cores
from services.data_server.arithmetic import questions


@dataclass(frozen=True)
class Work:
    """The training that both sides do."""

    model: str
    prompts: int
    group_size: int
    completion_tokens: int
    learning_rate: float
    steps: int
    bf16: bool = False
    target: float | None = None
    """Training stops when the mean reward of three steps is at least this."""
    limit_seconds: float | None = None
    """Training stops after the step in which it exceeds this time."""
    seed: int = 0


@dataclass(frozen=True)
class Steps:
    """Seconds and mean reward of each step of a run."""

    seconds: list[float]
    rewards: list[float]

    @classmethod
    def of_job(cls, steps: JobSteps) -> Steps:
        """Return the steps of a job group."""
        return cls([step["seconds_step"] for step in steps], [step["reward_mean"] for step in steps])


def train(work: Work, python: str) -> Steps:
    """Run TRL's GRPOTrainer on the demo's questions by the interpreter ``python``, which must have TRL."""
    with tempfile.TemporaryDirectory() as directory:
        rows, _ = questions(
            digits=[int(QUESTIONS["ARITHMETIC_DIGITS"])],
            operations=QUESTIONS["ARITHMETIC_OPERATIONS"],
            template=QUESTIONS["ARITHMETIC_TEMPLATE"],
            seed=0,
        )
        file = Path(directory) / "questions.jsonl"
        file.write_bytes(b"".join(orjson.dumps({"prompt": q.question, "answer": q.answer}) + b"\n" for q in rows))
        # TRL would look for a relative path on the hub.
        model = str(Path(work.model).resolve()) if Path(work.model).is_dir() else work.model
        given = {**asdict(work), "model": model, "questions": str(file), "directory": directory, "threads": cores()}
        command = [python, str(ROOT / "benchmarks/common/trl_grpo.py"), json.dumps(given)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(cores())}
        with harness.programs([command], [environment], RUN_SECONDS) as [process]:
            output = harness.output_of(process, "TRL")
    steps = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    return Steps([step["seconds"] for step in steps], [step["reward"] for step in steps])
