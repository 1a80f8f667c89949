"""Measure the trainer's update alone: seconds, tokens a second and memory, against a bare forward and backward pass.

    python -m benchmarks.trainer --model .cache/models/smollm2-135m [--ranks 1 2] [--quick] [--json FILE]

Each case runs in new processes, which join as under torchrun. All cases have the same number of threads in total. The
bare pass is the same model's own forward and backward over the same sequences, each with its own copy of the prompt,
with the usual cross-entropy and no optimizer: the least cost without shared prompts. The second table shows the memory
that a round needs beyond weights and optimizer state, with small models of several vocabularies. `--tables head` shows
ways to compute the output head in bfloat16 instead. The trainer's settings are read from the environment
(SHARD_PARAMETERS=false, LORA_RANK=8, ...).
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from benchmarks.common import harness, models, output_head
from benchmarks.common.harness import spread
from benchmarks.common.training import Rank, Work, run
from local_runner.environment import cores

TARGET = 0.8
"""The aim, as a share of the bare pass's tokens a second."""
BARE = "bare forward and backward"
SMALL = {"hidden_size": 256, "intermediate_size": 1024}
MEMORY_WORK = Work("", prompts=2, group_size=4, prompt_tokens=256, rounds=1)
MEMORY_CASES = ((32_768, 64), (32_768, 256), (32_768, 1024), (8_192, 256), (131_072, 256))
"""Vocabulary and completion tokens."""


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


def speed_cases(work: Work, ranks: Sequence[int], *, with_bare: bool) -> list[Case]:
    """Measure the bare pass, and both forms of the update on every number of ranks."""
    cases = [measure(work, 0)] if with_bare else []
    return cases + [measure(replace(work, shares_prompts=shares), n) for n in ranks for shares in (True, False)]


def show_speed(cases: Sequence[Case]) -> Table:
    """Return seconds, tokens, and the ratio to the bare pass as a table."""
    work = cases[0].work
    base = statistics.median(cases[0].seconds) if cases[0].name == BARE else None
    rows = []
    for case in cases:
        seconds = statistics.median(case.seconds)
        ratio = f"{base / seconds:.2f}" if base else ""
        peaks = " + ".join(f"{rank.peak_bytes / 1e9:.2f}" for rank in case.ranks)
        rows.append((case.name, spread(case.seconds), f"{work.trained_tokens / seconds:.0f}", ratio, peaks))
    return harness.table(
        f"{work.prompts} prompts of {work.prompt_tokens} tokens, {work.group_size} completions of "
        f"{work.completion_tokens} each; {threads()} threads in all; to reach: {TARGET} of the bare pass",
        ("", "seconds", "tokens/s", "of the bare pass", "peak GB by rank"),
        rows,
    )


def memory_cases(cases: Sequence[tuple[int, int]]) -> list[list[Case]]:
    """Measure the bare pass and the forms of the update with a small model, for each vocabulary and length."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        for vocabulary, tokens in cases:
            model = models.make_random(Path(name) / str(vocabulary), SMALL | {"vocab_size": vocabulary})
            work = replace(MEMORY_WORK, model=str(model), completion_tokens=tokens)
            harness.say(f"memory: vocabulary {vocabulary}, {tokens} tokens")
            shared = [measure(work, ranks) for ranks in (0, 1, 2)]
            found.append([*shared, measure(replace(work, shares_prompts=False), 1)])
    return found


def show_memory(found: Sequence[Sequence[Case]]) -> Table:
    """Return the megabytes of the rank that needs most as a table."""
    work = MEMORY_WORK
    rows = []
    for cases in found:
        vocabulary, tokens = int(Path(cases[0].work.model).name), cases[0].work.completion_tokens
        logits = 4 * vocabulary * work.prompts * work.group_size * tokens
        needed = [max(rank.needed_bytes for rank in case.ranks) for case in cases]
        rows.append((f"{vocabulary:,}", tokens, *(f"{number / 1e6:.0f}" for number in (logits, *needed))))
    return harness.table(
        f"MB that a round needs beyond what rests (the rank that needs most): {work.prompts} prompts of "
        f"{work.prompt_tokens} tokens, {work.group_size} completions each",
        ("vocabulary", "tokens of each", "all logits", *(case.name for case in found[0])),
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    defaults = Work(str(models.PRETRAINED))
    parser = harness.CommandLine("trainer", rounds=defaults.rounds, quick="one round; memory of two cases")
    parser.add_argument("--model", default=defaults.model, help="model directory or name")
    for name in ("prompts", "group_size", "prompt_tokens", "completion_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure")
    parser.add_argument("--no-bare", action="store_true", help="leave the bare pass out")
    parser.add_argument("--tables", nargs="+", choices=("speed", "memory", "head"), default=("speed", "memory"))
    given = parser.parse(arguments)
    tables: list[Table] = []
    speed: list[Case] = []
    memory: list[list[Case]] = []
    if "speed" in given.tables:
        speed = speed_cases(harness.made_of(Work, given), given.ranks, with_bare=not given.no_bare)
        tables.append(show_speed(speed))
    if "memory" in given.tables:
        memory = memory_cases(MEMORY_CASES[:2] if given.quick else MEMORY_CASES)
        tables.append(show_memory(memory))
    head = output_head.measure(given.rounds) if "head" in given.tables else ([], [])
    if "head" in given.tables:
        tables += output_head.show(*head)
    harness.finish(given, tables, {"speed": speed, "memory": memory, "head": head})


if __name__ == "__main__":
    main()
