"""Whole runs on a node's GPUs: phases of a step, publications, and a learning curve from each run's metrics.jsonl."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common import harness
from benchmarks.common.job import QUESTIONS, Job, Steps, running, write_job_group

PHASES = ("step", "generate", "train", "publish")
CURVE, OTHER = "broadcast", "disk"
"""The transport of the long run, which is the learning curve, and that of the short one."""

GSM8K = {
    "DATASET": "gsm8k",
    "REWARD_FN": "math",
    "ROLLOUT_ENGINE": "sglang",
    "BATCH_SIZE": "64",
    "GROUP_SIZE": "8",
    "MAX_NEW_TOKENS": "512",
    "EVAL_EVERY": "20",
    "EVAL_PROMPTS": "500",
    "CHECKPOINT_EVERY": "0",
}
ADDITIONS = QUESTIONS | {
    "ARITHMETIC_TEMPLATE": "{a}{op}{b}=",
    "ROLLOUT_ENGINE": "embedded",
    "BATCH_SIZE": "4",
    "GROUP_SIZE": "4",
    "MAX_NEW_TOKENS": "4",
    "EVAL_EVERY": "1",
    "EVAL_PROMPTS": "2",
}
"""Settings of --quick, for the model of toys.arithmetic."""


@dataclass(frozen=True)
class Run:
    """A run of jobgroup.yaml with one rollout node and one trainer node."""

    model: str
    gpus: int
    """GPUs of this machine that it uses; 0 for processors alone."""
    transport: str
    steps: int
    seconds: float
    """Longest time from the first step on; then the run is stopped."""
    settings: Mapping[str, str]

    @property
    def name(self) -> str:
        """The name in messages and of the directory of its files."""
        return f"{self.gpus}-gpus-{self.transport}"

    @property
    def gpus_of_each(self) -> int:
        """GPUs of the rollout node, and of the trainer's node."""
        return max(self.gpus // 2, min(self.gpus, 1))

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the run."""
        own = {"MODEL_NAME": self.model, "PUBLISH_TRANSPORT": self.transport, "MAX_STEPS": str(self.steps)}
        # Two processes share the only GPU; SGLang would take most of its memory.
        shared = {"SGLANG_EXTRA_FLAGS": "--mem-fraction-static 0.3"} if self.gpus == 1 else {}
        return {**self.settings, **own, **shared, "MIN_WORKERS": "1", "NUM_EPOCHS": "1000"}


def runs(model: str, counts: Sequence[int], settings: Mapping[str, str], steps: tuple[int, int]) -> list[Run]:
    """Return the runs on each number of GPUs: one by each transport; by the volume alone on one GPU.

    NCCL joins no two processes on one GPU.

    Args:
        model: a model's name or directory.
        counts: numbers of GPUs.
        settings: variables of all runs.
        steps: of the learning curve, and of the other run.
    """
    long, short = steps
    made = []
    for gpus in counts:
        transports = {OTHER: long} if gpus == 1 else {CURVE: long, OTHER: short}
        seconds = {long: 600.0, short: 180.0}
        made += [Run(model, gpus, name, count, seconds[count], settings) for name, count in transports.items()]
    return made


def measure(run: Run, results: Path) -> dict[str, Any]:
    """Do a run, copy its metrics and logs to ``results``, and return its figures; ``error`` where it failed."""
    case: dict[str, Any] = {"gpus": run.gpus, "transport": run.transport}
    with tempfile.TemporaryDirectory() as name, noting_failure(case):
        directory = Path(name)
        gpus = {"rollout-server": run.gpus_of_each, "ppo-trainer": run.gpus_of_each}
        path = write_job_group(directory, "jobgroup.yaml", {}, gpus=gpus)
        with running(directory, path, run.environment, {"rollout-server": 1, "ppo-trainer": 1}) as job:
            try:
                job.wait(lambda: _is_late(job, run.seconds))
            finally:
                _keep(job, results / run.name)
        case |= figures(job.steps())
    return case


@contextmanager
def noting_failure(case: dict[str, Any]) -> Iterator[None]:
    """Write a failed program's message to ``case`` as ``error``, so that the other measurements go on."""
    try:
        yield
    except SystemExit as failure:
        if not isinstance(failure.code, str):
            raise
        harness.say(failure.code)
        case["error"] = failure.code.splitlines()[-1]


def figures(steps: Steps) -> dict[str, Any]:
    """Return a run's medians over its steps after the first, and its learning curve."""
    trained = [step for step in steps if "seconds_train" in step]
    later = trained[1:] or trained
    tokens = sum(step["completions"] * step["length_mean"] for step in later)
    shown = ("step", "reward_mean", "accuracy")
    return {
        "steps": len(trained),
        "seconds": {phase: statistics.median(step[f"seconds_{phase}"] for step in later) for phase in PHASES},
        "pause_seconds": statistics.median(step["pause_seconds"] for step in later),
        "generated_tokens_per_second": tokens / sum(step["seconds_generate"] for step in later),
        "curve": [{name: step[name] for name in shown if name in step} for step in steps],
    }


def show(cases: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the runs' figures, and their accuracies by step, as tables."""
    rows, points = [], []
    for case in cases:
        name = (case["gpus"], case["transport"])
        if "error" in case:
            rows.append((*name, case["error"], *[""] * (len(PHASES) + 2)))
            continue
        seconds = [f"{case['seconds'][phase]:.2f}" for phase in PHASES]
        tokens = f"{case['generated_tokens_per_second']:.0f}"
        rows.append((*name, case["steps"], *seconds, f"{case['pause_seconds']:.2f}", tokens))
        points += [(*name, point["step"], f"{point['accuracy']:.3f}") for point in case["curve"] if "accuracy" in point]
    phases = [f"{phase} s" for phase in PHASES]
    return [
        harness.table(
            "runs, half of the GPUs for engines: medians of the steps",
            ("GPUs", "transport", "steps", *phases, "pause s", "generated tokens/s"),
            rows,
        ),
        harness.table(
            "learning: greedy pass@1 on held-out questions", ("GPUs", "transport", "step", "accuracy"), points
        ),
    ]


def _is_late(job: Job, seconds: float) -> bool:
    steps = job.steps()
    return bool(steps) and time.time() - steps[0]["time"] > seconds


def _keep(job: Job, where: Path) -> None:
    where.mkdir(parents=True, exist_ok=True)
    for file in (job.messages, job.run_dir / "metrics.jsonl", job.run_dir / "config.json"):
        if file.exists():
            shutil.copy(file, where)
    if (job.run_dir / "logs").is_dir():
        shutil.copytree(job.run_dir / "logs", where / "logs", dirs_exist_ok=True)
