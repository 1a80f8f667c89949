"""Measure updates, publications by both transports, and a learning curve on this node's GPUs; about an hour in all.

    python -m benchmarks.gpu [--models Qwen/Qwen2.5-0.5B-Instruct ...] [--quick] [--results gpu-benchmark] [--json FILE]

1. Updates of each model on random tokens, in completions of 500 and of 2,000 tokens, on 1, 2 and 8 GPUs.
2. Runs of jobgroup.yaml on GSM8K with the first model, on 1, 2 and 8 GPUs: 100 steps by broadcast, which are the
   learning curve, and 10 steps by the shared volume. SGLANG_PYTHON is the interpreter of an environment with SGLang.

Measurements that fail are noted, and the others go on. Metrics, logs and the machine's description are written to
``--results`` and packed into one file to send back. ``--quick`` measures a tiny model with the embedded engine, also
without a GPU: so far this program has run only in this way, on processors.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import orjson
import torch
from rich.table import Table
from transformers import AutoConfig

from benchmarks.common import gpu_runs, harness, models
from benchmarks.common.training import Work, run
from benchmarks.scaling.roofline import peak
from trainer.preflight.shape import ModelShape

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("gpu", rounds=3, quick="a tiny model and few steps, to see that everything runs")
    parser.add_argument("--models", nargs="+", help=f"model directories or names; default {' '.join(MODELS)}")
    parser.add_argument("--results", type=Path, default=Path("gpu-benchmark"), help="directory of what is to be sent")
    given = parser.parse(arguments)
    if not given.quick and not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; see docs/gpus.md for drivers and images")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    given.results.mkdir(parents=True, exist_ok=True)
    describe_machine(given.results)
    with tempfile.TemporaryDirectory() as name:
        if not given.models:
            given.models = [str(models.directory("tiny", Path(name)))] if given.quick else MODELS
        results = measure_all(given)
    tables = [show_updates(results["updates"]), *gpu_runs.show(results["runs"])]
    (given.results / "results.json").write_bytes(orjson.dumps(results, default=str, option=orjson.OPT_INDENT_2))
    packed = shutil.make_archive(str(given.results), "gztar", given.results)
    harness.finish(given, tables, results)
    harness.say(f"please send back {packed}, and docs/benchmarks/gpu.json if it was written")


def measure_all(given: Any) -> dict[str, Any]:
    """Return all figures by part."""
    gpus = torch.cuda.device_count()
    counts = [count for count in COUNTS if count <= gpus] or [0]
    settings, steps = (gpu_runs.ADDITIONS, QUICK_STEPS) if given.quick else (gpu_runs.GSM8K, STEPS)
    updates = []
    for model in given.models:
        if not given.quick and not Path(model).is_dir():
            huggingface_hub.snapshot_download(model)
        for length in [4] if given.quick else LENGTHS:
            for count in counts:
                work = Work(model, 8 * max(count, 1), 8, 10 if given.quick else 100, length, rounds=given.rounds)
                updates.append(measure_update(work, max(count, 1)))
                harness.say(f"update: {updates[-1]}")
    runs = []
    for one in gpu_runs.runs(given.models[0], counts, settings, steps):
        runs.append(gpu_runs.measure(one, given.results))
        harness.say(f"run {one.name}: {runs[-1].get('error', 'done')}")
    gpu = torch.cuda.get_device_name(0) if gpus else "none"
    machine = {"gpu": gpu, "gpus": gpus, "torch": torch.__version__, "cuda": torch.version.cuda}
    return {"machine": machine, "updates": updates, "runs": runs}


def measure_update(work: Work, ranks: int) -> dict[str, Any]:
    """Return the median seconds of an update, and its useful operations a second: 6 a parameter and token.

    ``error`` says why there is none, for example because the model does not fit.
    """
    case: dict[str, Any] = {"model": work.model, "length": work.completion_tokens, "ranks": ranks, "work": asdict(work)}
    with gpu_runs.noting_failure(case):
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


def show_updates(cases: Sequence[dict[str, Any]]) -> Table:
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
    return harness.table("updates", header, rows)


def describe_machine(results: Path) -> None:
    """Write what the commands of MACHINE print to files."""
    for name, command in MACHINE.items():
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            text = f"{command[0]}: {error}\n"
        (results / name).write_text(text)


if __name__ == "__main__":
    main()
