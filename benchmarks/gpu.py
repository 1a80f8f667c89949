"""Measure updates of the trainer on this node's GPUs, and write the results with the machine's description.

    python -m benchmarks.gpu [--models Qwen/Qwen2.5-0.5B-Instruct ...] [--json docs/benchmarks/gpu.json]

Each model is trained on random tokens in completions of 500 and of 2,000 tokens, on 1, 2 and 8 GPUs as far as there are
so many. This program has not been run on a GPU yet; docs/gpus.md says what to send back.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.common import harness
from benchmarks.common.training import Work, run
from benchmarks.scaling.roofline import peak
from trainer.preflight.shape import ModelShape

MODELS = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-8B")
LENGTHS = (500, 2000)
RANKS = (1, 2, 8)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("gpu", rounds=3, quick="one round")
    parser.add_argument("--models", nargs="+", default=MODELS, help="model directories or names")
    given = parser.parse(arguments)
    gpus = torch.cuda.device_count()
    if not gpus:
        raise SystemExit("error: torch sees no GPU; see docs/gpus.md for drivers and images")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    cases: list[dict[str, Any]] = []
    for model in given.models:
        for length in LENGTHS:
            for ranks in (n for n in RANKS if n <= gpus):
                work = Work(model, 8 * ranks, 8, 100, length, rounds=given.rounds)
                cases.append(measure(work, ranks))
                harness.say(f"{model}, {length} tokens, {ranks} GPUs: {cases[-1]['tokens_per_second']:.0f} tokens/s")
    properties = torch.cuda.get_device_properties(0)
    machine = {
        "gpu": properties.name,
        "memory": properties.total_memory,
        "gpus": gpus,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    header = ("model", "completion", "GPUs", "seconds", "tokens/s", "TFLOP/s a GPU", "MFU %")
    names = ("model", "length", "ranks", "seconds", "tokens_per_second", "teraflops_per_gpu", "mfu_percent")
    rows = [[f"{case[name]:.1f}" if isinstance(case[name], float) else case[name] for name in names] for case in cases]
    harness.finish(given, [harness.table("updates", header, rows)], {"machine": machine, "cases": cases})


def measure(work: Work, ranks: int) -> dict[str, Any]:
    """Return the median seconds of an update, and its useful operations a second: 6 a parameter and token."""
    measured = run(work, ranks, threads=4, compute_type="auto")
    seconds = statistics.median(measured[0].seconds)
    # Prompts are computed once a group.
    tokens = work.prompts * (work.prompt_tokens + work.group_size * work.completion_tokens)
    parameters = ModelShape.of(AutoConfig.from_pretrained(work.model)).parameters
    operations = 6 * parameters * tokens / seconds / ranks
    most = peak(torch.cuda.get_device_name(0))
    return {
        "model": work.model,
        "length": work.completion_tokens,
        "ranks": ranks,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "teraflops_per_gpu": operations / 1e12,
        "mfu_percent": None if most is None else 100 * operations / most,
        "work": asdict(work),
    }


if __name__ == "__main__":
    main()
