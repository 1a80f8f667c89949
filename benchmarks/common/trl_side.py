"""The two sides of the benchmarks of whole steps: the job group, and TRL's GRPOTrainer."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from benchmarks.common import harness
from benchmarks.common.harness import ROOT
from benchmarks.common.job import JOB_GROUP, QUESTIONS, RUN_SECONDS, run_job
from benchmarks.common.job import Steps as JobSteps
from services.core.machine import cores
from services.data_server.generators import arithmetic_questions


@dataclass(frozen=True)
class Work:
    """The training that both sides do."""

    model: str
    prompts: int
    group_size: int
    completion_tokens: int
    steps: int
    learning_rate: float = 1e-5
    target: float | None = None
    """Training stops when the mean reward of three steps is at least this."""
    limit_seconds: float | None = None
    """Training stops after the step in which it exceeds this time."""
    dtype: str = "float32"
    """``float32`` or ``bfloat16``: what both sides compute in. Their weights are float32."""


@dataclass(frozen=True)
class Steps:
    """Seconds and mean reward of each step of a run."""

    seconds: list[float]
    rewards: list[float]


@dataclass
class Side:
    """One of the two sides and its runs."""

    name: str
    train: Callable[[int], Steps]
    """Trains with a seed."""
    runs: list[Steps] = field(default_factory=list)

    def add_round(self) -> str:
        """Add a run with a seed of its own; return what to print of it."""
        run = self.train(len(self.runs))
        self.runs.append(run)
        return f"{len(run.seconds)} steps in {sum(run.seconds):.0f} s"


def train_job_group(
    base: Mapping[str, object], work: Work, seed: int, is_enough: Callable[[Steps], bool] = lambda _: False
) -> Steps:
    """Train with the job group, one rollout and one trainer node, by the settings ``base`` and those of the work."""
    settings = {
        **base,
        "MODEL_NAME": work.model,
        "BATCH_SIZE": work.prompts,
        "GROUP_SIZE": work.group_size,
        "MAX_NEW_TOKENS": work.completion_tokens,
        "LEARNING_RATE": work.learning_rate,
        "COMPUTE_TYPE": work.dtype,
        "ENGINE_DTYPE": work.dtype,
        "PUBLISH_TYPE": work.dtype,
        "MAX_STEPS": work.steps,
        "MIN_WORKERS": 1,
        "SEED": seed,
    }
    nodes = {"rollout-server": 1, "ppo-trainer": 1}
    return _of_job(run_job(JOB_GROUP, settings, nodes, lambda steps: is_enough(_of_job(steps))))


def _of_job(steps: JobSteps) -> Steps:
    return Steps([step["seconds_step"] for step in steps], [step["reward_mean"] for step in steps])


def train_trl(work: Work, seed: int, python: str) -> Steps:
    """Run TRL's GRPOTrainer on the demo's questions by the interpreter ``python``, which must have TRL."""
    with tempfile.TemporaryDirectory() as directory:
        rows, _ = arithmetic_questions(
            digits=[int(QUESTIONS["ARITHMETIC_DIGITS"])],
            operations=QUESTIONS["ARITHMETIC_OPERATIONS"],
            template=QUESTIONS["ARITHMETIC_TEMPLATE"],
            seed=0,
        )
        file = Path(directory) / "questions.jsonl"
        file.write_bytes(b"".join(orjson.dumps({"prompt": q.question, "answer": q.answer}) + b"\n" for q in rows))
        # TRL would look for a relative path on the hub.
        model = str(Path(work.model).resolve()) if Path(work.model).is_dir() else work.model
        given = {
            **asdict(work),
            "seed": seed,
            "threads": cores(),
            "model": model,
            "questions": str(file),
            "directory": directory,
        }
        command = [python, str(ROOT / "benchmarks/common/trl_grpo.py"), json.dumps(given)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(cores())}
        with harness.programs([command], [environment], RUN_SECONDS) as [process]:
            output = harness.output_of(process, "TRL")
    steps = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    return Steps([step["seconds"] for step in steps], [step["reward"] for step in steps])
