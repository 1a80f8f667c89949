"""TRL's side of the benchmarks of whole steps: what is trained, and how its program is run."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from benchmarks.common.job import QUESTIONS, ROOT, run
from services.data_server.arithmetic import questions


@dataclass(frozen=True)
class Work:
    """What both train."""

    model: str
    prompts: int
    group_size: int
    completion_tokens: int
    learning_rate: float
    steps: int
    bf16: bool = False
    target: float | None = None
    """Stop at this mean reward over three steps."""
    limit_seconds: float | None = None
    """Stop after the step in which so many seconds of training have passed."""
    seed: int = 0


@dataclass(frozen=True)
class Steps:
    """The steps of a run, in order."""

    seconds: list[float]
    rewards: list[float]


def train(work: Work, python: str, threads: int) -> Steps:
    """Runs TRL's GRPOTrainer on the demo's questions by the interpreter ``python``, which has it."""
    with tempfile.TemporaryDirectory() as directory:
        rows, _ = questions(
            digits=[int(QUESTIONS["ARITHMETIC_DIGITS"])],
            operations=QUESTIONS["ARITHMETIC_OPERATIONS"],
            template=QUESTIONS["ARITHMETIC_TEMPLATE"],
            seed=0,
        )
        file = Path(directory) / "questions.jsonl"
        file.write_bytes(b"".join(orjson.dumps({"prompt": q.text, "answer": q.answer}) + b"\n" for q in rows))
        # It looks for its model relative to its own working directory.
        model = str(Path(work.model).resolve()) if Path(work.model).is_dir() else work.model
        given = {**asdict(work), "model": model, "questions": str(file), "directory": directory, "threads": threads}
        program = str(ROOT / "benchmarks/common/trl_grpo.py")
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        output = run([python, program, json.dumps(given)], environment=environment)
    steps = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    return Steps([step["seconds"] for step in steps], [step["reward"] for step in steps])
