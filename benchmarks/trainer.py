"""Measures the trainer's update alone: seconds, tokens a second and memory, against a bare forward and backward pass.

    python -m benchmarks.trainer --model .cache/models/smollm2-135m [--ranks 1 2] [--quick] [--json FILE]

Each case runs in fresh processes, joined as torchrun would join them; all cases have the same number of threads in all.
The bare pass is the same model's own forward and backward over the same sequences, each with its own copy of the
prompt, with the usual cross-entropy and no optimizer: what anyone must pay at least who does not share prompts. The
second table is of memory that a round needs beyond weights and optimizer state, with small models of several
vocabularies. The trainer's settings are read from the environment as always (SHARD_PARAMETERS=false, LORA_RANK=8, ...).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common import models
from benchmarks.common.ending import end_in_order
from benchmarks.common.figures import spread
from benchmarks.common.training import Reply, What, Work, run
from local_runner.environment import cores

TARGET = 0.8
"""Of the bare pass's tokens a second."""
SMALL = {"hidden_size": 256, "intermediate_size": 1024}
MEMORY_WORK = Work("", prompts=2, group_size=4, prompt_tokens=256, rounds=1)
MEMORY_CASES = ((32_768, 64), (32_768, 256), (32_768, 1024), (8_192, 256), (131_072, 256))
"""Vocabulary and completion tokens."""


@dataclass
class Case:
    """One way of computing the same work, and what was measured of it."""

    name: str
    what: What
    ranks: int
    work: Work
    replies: list[Reply]
    """By rank."""

    @classmethod
    def measured(cls, name: str, what: What, ranks: int, work: Work) -> Case:
        """Runs it, with an equal share of the threads for each rank."""
        case = cls(name, what, ranks, work, run(work, what, ranks, max(threads() // ranks, 1)))
        print(f"{name}: {statistics.median(case.seconds):.2f} s", file=sys.stderr, flush=True)
        return case

    @property
    def seconds(self) -> list[float]:
        """By round."""
        return self.replies[0].seconds


def threads() -> int:
    """OMP_NUM_THREADS, or as many as there are cores: together, whatever the number of ranks."""
    return int(os.environ.get("OMP_NUM_THREADS", cores()))


def bare(work: Work) -> Case:
    """A bare pass over the work."""
    return Case.measured("bare forward and backward", "bare", 1, work)


def update(work: Work, ranks: int, *, shares_prompts: bool) -> Case:
    """The trainer's update on it."""
    how = "shared prompts" if shares_prompts else "each its prompt"
    name = f"{ranks} rank{'s' if ranks > 1 else ''}, {how}"
    return Case.measured(name, "update", ranks, replace(work, shares_prompts=shares_prompts))


def speed_cases(work: Work, ranks: Sequence[int], *, with_bare: bool) -> list[Case]:
    """Both forms of the update on every number of ranks; the bare pass first."""
    cases = [bare(work)] if with_bare else []
    return cases + [update(work, count, shares_prompts=shares) for count in ranks for shares in (True, False)]


def show_speed(cases: Sequence[Case]) -> Table:
    """Seconds and tokens, and the ratio to the bare pass."""
    work = cases[0].work
    table = Table(
        title=f"{work.prompts} prompts of {work.prompt_tokens} tokens, {work.group_size} completions of "
        f"{work.completion_tokens} each; {threads()} threads in all; to reach: {TARGET} of the bare pass"
    )
    for name in ("", "seconds", "tokens/s", "of the bare pass", "peak GB by rank"):
        table.add_column(name, justify="right" if name else "left")
    base = statistics.median(cases[0].seconds) if cases[0].what == "bare" else None
    for case in cases:
        seconds = statistics.median(case.seconds)
        table.add_row(
            case.name,
            spread(case.seconds),
            f"{work.trained_tokens / seconds:.0f}",
            f"{base / seconds:.2f}" if base else "",
            " + ".join(f"{reply.peak_bytes / 1e9:.2f}" for reply in case.replies),
        )
    return table


def memory_cases(cases: Sequence[tuple[int, int]]) -> list[list[Case]]:
    """For each vocabulary and length: the bare pass and the update in its forms, of a small model."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        for vocabulary, tokens in cases:
            model = models.make_random(Path(name) / str(vocabulary), SMALL | {"vocab_size": vocabulary})
            work = replace(MEMORY_WORK, model=str(model), completion_tokens=tokens)
            print(f"memory: vocabulary {vocabulary}, {tokens} tokens", file=sys.stderr)
            shared = [update(work, ranks, shares_prompts=True) for ranks in (1, 2)]
            found.append([bare(work), *shared, update(work, 1, shares_prompts=False)])
    return found


def show_memory(rows: Sequence[Sequence[Case]]) -> Table:
    """Megabytes of the rank that needs most."""
    work = MEMORY_WORK
    table = Table(
        title=f"MB that a round needs beyond what rests (the rank that needs most): {work.prompts} prompts of "
        f"{work.prompt_tokens} tokens, {work.group_size} completions each"
    )
    for name in ("vocabulary", "tokens of each", "all logits", *(case.name for case in rows[0])):
        table.add_column(name, justify="right")
    for row in rows:
        vocabulary = int(Path(row[0].work.model).name)
        logits = 4 * vocabulary * row[0].work.completion_positions
        needed = [max(reply.needed_bytes for reply in case.replies) for case in row]
        shown = [f"{number / 1e6:.0f}" for number in (logits, *needed)]
        table.add_row(f"{vocabulary:,}", str(row[0].work.completion_tokens), *shown)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer")
    defaults = Work("")
    parser.add_argument("--model", default=str(models.PRETRAINED), help="model directory or name")
    for name in ("prompts", "group_size", "prompt_tokens", "completion_tokens", "rounds"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure")
    parser.add_argument("--no-bare", action="store_true", help="leave the bare pass out")
    parser.add_argument("--tables", nargs="+", choices=("speed", "memory"), default=("speed", "memory"))
    parser.add_argument("--quick", action="store_true", help="one round; memory of two cases")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    given = parser.parse_args(arguments)
    end_in_order()
    names = ("model", "prompts", "group_size", "prompt_tokens", "completion_tokens", "rounds")
    work = Work(**{name: getattr(given, name) for name in names})
    if given.quick:
        work = replace(work, rounds=1)
    speed, memory = [], []
    if "speed" in given.tables:
        speed = speed_cases(work, given.ranks, with_bare=not given.no_bare)
        Console().print(show_speed(speed))
    if "memory" in given.tables:
        memory = memory_cases(MEMORY_CASES[:2] if given.quick else MEMORY_CASES)
        Console().print(show_memory(memory))
    if given.json:
        result = {"speed": [asdict(c) for c in speed], "memory": [[asdict(c) for c in row] for row in memory]}
        given.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
