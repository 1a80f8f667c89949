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
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from benchmarks.common import harness, models
from benchmarks.common.harness import spread
from benchmarks.common.training import Rank, Work, run
from local_runner.environment import cores

TARGET = 0.8
"""The aim, as a share of the bare pass's tokens a second."""
BARE = "bare forward and backward"


@dataclass
class Case:
    """A way to compute the work, and its measurements by rank."""

    name: str
    work: Work
    ranks: list[Rank]

    @property
    def seconds(self) -> list[float]:
        """Seconds of each round."""
        return self.ranks[0].seconds


def threads() -> int:
    """Return OMP_NUM_THREADS or the number of cores: the threads of all ranks together."""
    return int(os.environ.get("OMP_NUM_THREADS", cores()))


def measure(work: Work, ranks: int) -> Case:
    """Measure the trainer's update, or with 0 ranks the bare pass."""
    how = "shared prompts" if work.shares_prompts else "each its prompt"
    name = f"{ranks} rank{'s' if ranks > 1 else ''}, {how}" if ranks else BARE
    count = max(1, ranks)
    case = Case(name, work, run(work, "update" if ranks else "bare", count, max(threads() // count, 1)))
    harness.say(f"{name}: {statistics.median(case.seconds):.2f} s")
    return case


def show(cases: Sequence[Case]) -> Table:
    """Return seconds, tokens, and the ratio to the bare pass as a table."""
    work = cases[0].work
    base = statistics.median(cases[0].seconds)
    rows = []
    for case in cases:
        seconds = statistics.median(case.seconds)
        peaks = " + ".join(f"{rank.peak_bytes / 1e9:.2f}" for rank in case.ranks)
        rows.append(
            (case.name, spread(case.seconds), f"{work.trained_tokens / seconds:.0f}", f"{base / seconds:.2f}", peaks)
        )
    return harness.table(
        f"{work.prompts} prompts of {work.prompt_tokens} tokens, {work.group_size} completions of "
        f"{work.completion_tokens} each; {threads()} threads in all; to reach: {TARGET} of the bare pass",
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
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure")
    given = parser.parse(arguments)
    work = harness.made_of(Work, given)
    cases = [measure(work, 0)]
    cases += [measure(replace(work, shares_prompts=shares), n) for n in given.ranks for shares in (True, False)]
    harness.finish(given, [show(cases)], cases)


if __name__ == "__main__":
    main()
