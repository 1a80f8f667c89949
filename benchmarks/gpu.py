"""Updates, publications and learning on a node's GPUs; whole runs with their phases, from each run's metrics.jsonl."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import orjson
import torch
from rich.table import Table
from transformers import AutoConfig

from benchmarks import harness, models
from benchmarks.harness import Args, Benchmark, Option, Side
from benchmarks.job import QUESTIONS, Job, Steps, running, write_job_group
from benchmarks.scaling.roofline import peak
from benchmarks.training import Work, run
from trainer.preflight.shape import ModelShape

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
    "DATASET_CONFIG": '{"template": "{a}{op}{b}="}',
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


def measure_run(run: Run, results: Path) -> dict[str, Any]:
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
    """Write a failed program's message to ``case`` as ``error``, so that the other measurements continue."""
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


def run_tables(cases: Sequence[Mapping[str, Any]]) -> list[Table]:
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
        harness.table_of_rows(
            "runs, half of the GPUs for engines: medians of the steps",
            ("GPUs", "transport", "steps", *phases, "pause s", "generated tokens/s"),
            rows,
        ),
        harness.table_of_rows(
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


MODELS = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-8B")
LENGTHS = (500, 2000)
COUNTS = (1, 2, 8)
STEPS = (100, 10)
QUICK_STEPS = (2, 1)
MACHINE = {
    "nvidia-smi.txt": ("nvidia-smi",),
    "topology.txt": ("nvidia-smi", "topo", "-m"),
    "packages.txt": (sys.executable, "-m", "pip", "freeze"),
}
"""Files of the machine's description, and the commands that print them."""


def measure(args: Args) -> list[Side]:
    """Measure updates, publications by both transports, and a learning curve on this node's GPUs; about an hour in all.

    1. Updates of each model on random tokens, in completions of 500 and of 2,000 tokens, on 1, 2 and 8 GPUs.
    2. Runs of jobgroup.yaml on GSM8K with the first model, on 1, 2 and 8 GPUs: 100 steps by broadcast, which are the
       learning curve, and 10 steps by the shared volume. SGLANG_PYTHON is the interpreter of SGLang's environment.

    Measurements that fail are noted, and the others continue. Metrics, logs and the machine's description are written
    to --results and packed into one file to send back. --quick measures a tiny model with the embedded engine, also
    without a GPU: so far this program has run only in this way, on processors.

    Raises:
        SystemExit: there is no GPU, and --quick is not given.
    """
    if not args.quick and not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; see docs/gpus.md for drivers and images")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    args.results = Path(args.results)
    args.results.mkdir(parents=True, exist_ok=True)
    describe_machine(args.results)
    counts = [count for count in COUNTS if count <= torch.cuda.device_count()] or [0]
    with tempfile.TemporaryDirectory() as name:
        if not args.models:
            args.models = [str(models.directory("tiny", Path(name)))] if args.quick else MODELS
        updates = list(measure_updates(args, counts))
        settings, steps = (ADDITIONS, QUICK_STEPS) if args.quick else (GSM8K, STEPS)
        trained = []
        for one in runs(args.models[0], counts, settings, steps):
            trained.append(measure_run(one, args.results))
            harness.say(f"run {one.name}: {trained[-1].get('error', 'done')}")
    return [Side("updates", lambda _: {}, updates), Side("runs", lambda _: {}, trained)]


def measure_updates(args: Args, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the figures of an update of each model, length and number of GPUs."""
    for model in args.models:
        if not args.quick and not Path(model).is_dir():
            huggingface_hub.snapshot_download(model)
        for length in [4] if args.quick else LENGTHS:
            for count in counts:
                work = Work(model, 8 * max(count, 1), 8, 10 if args.quick else 100, length, rounds=args.rounds)
                case = measure_update(work, max(count, 1))
                harness.say(f"update: {case}")
                yield case


def measure_update(work: Work, ranks: int) -> dict[str, Any]:
    """Return the median seconds of an update, and its useful operations a second: 6 a parameter and token.

    ``error`` says why there is none, for example because the model does not fit.
    """
    case: dict[str, Any] = {"model": work.model, "length": work.completion_tokens, "ranks": ranks, "work": asdict(work)}
    with noting_failure(case):
        measured = run(replace(work, dtype="auto"), ranks, threads=4 if torch.cuda.is_available() else 1)
        seconds = statistics.median(measured[0].seconds)
        # Prompts are computed once a group.
        tokens = work.prompts * (work.prompt_tokens + work.group_size * work.completion_tokens)
        parameters = ModelShape.of(AutoConfig.from_pretrained(work.model)).parameters
        operations = 6 * parameters * tokens / seconds / ranks
        most = peak(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
        case |= {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "teraflops_per_gpu": operations / 1e12,
            "mfu_percent": None if most is None else 100 * operations / most,
        }
    return case


def update_table(cases: Sequence[dict[str, Any]]) -> Table:
    """Return the updates as a table."""
    names = ("seconds", "tokens_per_second", "teraflops_per_gpu", "mfu_percent")

    def cell(case: dict[str, Any], name: str) -> str:
        number = case.get(name)
        return f"{number:.4g}" if isinstance(number, float) else case.get("error", "") if name == names[0] else ""

    header = ("model", "completion", "ranks", "seconds", "tokens/s", "TFLOP/s a GPU", "MFU %")
    rows = [
        (Path(case["model"]).name, case["length"], case["ranks"], *(cell(case, name) for name in names))
        for case in cases
    ]
    return harness.table_of_rows("updates", header, rows)


def describe_machine(results: Path) -> None:
    """Write what the commands of MACHINE print to files."""
    for name, command in MACHINE.items():
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            text = f"{command[0]}: {error}\n"
        (results / name).write_text(text)


def tables(_args: Args, sides: Sequence[Side]) -> list[Table]:
    """Return the tables of updates, runs and their learning."""
    updates, trained = (side.rounds for side in sides)
    return [update_table(updates), *run_tables(trained)]


def conclude(args: Args, sides: Sequence[Side]) -> int:
    """Write results.json, and pack everything into one file to send back."""
    gpus = torch.cuda.device_count()
    gpu = torch.cuda.get_device_name(0) if gpus else "none"
    machine = {"gpu": gpu, "gpus": gpus, "torch": torch.__version__, "cuda": torch.version.cuda}
    results = {"machine": machine, **{side.name: side.rounds for side in sides}}
    (args.results / "results.json").write_bytes(orjson.dumps(results, default=str, option=orjson.OPT_INDENT_2))
    packed = shutil.make_archive(str(args.results), "gztar", args.results)
    harness.say(f"please send back {packed}, and docs/benchmarks/gpu.json if it was written")
    return 0


GPU = Benchmark(
    measure=measure,
    tables=tables,
    rounds=3,
    options={
        "models": Option([], f"model directories or names; default {' '.join(MODELS)}"),
        "results": Option("gpu-benchmark", "directory of the files to send"),
    },
    conclude=conclude,
)
