"""Measure the trainer's update alone: seconds, tokens a second and memory, against a bare forward and backward pass.

    python -m benchmarks.trainer --model .cache/models/smollm2-135m [--ranks 1 2] [--quick] [--json FILE]

Each case runs in new processes, which join as under torchrun. All cases have the same number of threads in total. The
bare pass is the same model's own forward and backward over the same sequences, each with its own copy of the prompt,
with the usual cross-entropy and no optimizer: the least cost without shared prompts. The trainer's settings are read
from the environment (SHARD_PARAMETERS=false, LORA_RANK=8, ...).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.table import Table

from benchmarks.common import harness, models
from benchmarks.common.harness import spread
from benchmarks.common.training import Rank, Work, run
from services.core.machine import cores

TARGET = 0.8
"""The aim, as a share of the bare pass's tokens a second."""
BARE = "bare forward and backward"


def threads() -> int:
    """Return OMP_NUM_THREADS or the number of cores: the threads of all ranks together."""
    return int(os.environ.get("OMP_NUM_THREADS", cores()))


def show(work: Work, cases: Mapping[str, Sequence[Rank]]) -> Table:
    """Return seconds, tokens, and the ratio to the bare pass as a table."""
    base = statistics.median(cases[BARE][0].seconds)
    rows = []
    for name, ranks in cases.items():
        seconds = statistics.median(ranks[0].seconds)
        speed = (f"{work.trained_tokens / seconds:.0f}", f"{base / seconds:.2f}")
        peaks = " + ".join(f"{rank.peak_bytes / 1e9:.2f}" for rank in ranks)
        rows.append((name, spread(ranks[0].seconds), *speed, peaks))
    return harness.table(
        f"{work.prompts} prompts of {work.prompt_tokens} tokens, {work.group_size} completions of "
        f"{work.completion_tokens} each, {work.dtype}; {threads()} threads in all; to reach: {TARGET} of the bare pass",
        ("", "seconds", "tokens/s", "of the bare pass", "peak GB by rank"),
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    defaults = Work(str(models.PRETRAINED))
    parser = harness.CommandLine("trainer", rounds=defaults.rounds, quick="one round")
    parser.add_argument("--model", default=defaults.model, help="model directory or name")
    for name in ("prompts", "group_size", "prompt_tokens", "completion_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_dtype()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure")
    given = parser.parse(arguments)
    work = harness.made_of(Work, given)
    cases = {BARE: run(replace(work, is_bare=True), 1, threads())}
    for ranks in given.ranks:
        for shares in (True, False):
            name = f"{ranks} rank{'s' if ranks > 1 else ''}, {'shared prompts' if shares else 'each its prompt'}"
            cases[name] = run(replace(work, shares_prompts=shares), ranks, max(threads() // ranks, 1))
            harness.say(f"{name}: {statistics.median(cases[name][0].seconds):.2f} s")
    harness.finish(given, [show(work, cases)], {"work": work, "ranks": cases})


if __name__ == "__main__":
    main()
