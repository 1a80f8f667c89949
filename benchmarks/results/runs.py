"""Runs of training with their results, one line of JSON each, and the parts of the page that they belong to."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from benchmarks import harness
from benchmarks.harness import ROOT
from services.core.files import read_records
from services.core.machine import cores

KEPT = ROOT / "docs/results"
"""Directory of the results' data and plots."""

Settings = dict[str, str]
"""Environment variables of trainer, engine, data-server and reward-server."""
Train = Callable[["Run"], "Result"]
"""Makes a run."""

OF_THE_MACHINE = (
    "CHECKPOINT_EVERY",
    "CUDA_VISIBLE_DEVICES",
    "KEEP_MEMORY",
    "MALLOC_ARENA_MAX",
    "MICRO_BATCH_TOKENS",
    "MIN_WORKERS",
    "SHARD_PARAMETERS",
)
"""Settings that change results only by rounding; stored runs stay valid when only these differ."""


@dataclass(frozen=True)
class Run:
    """A run to make."""

    task: str
    variant: str
    """The name of the settings in tables and plots."""
    seed: int
    settings: Settings
    """All settings that differ from the defaults; a model that is made for the run has no MODEL_NAME here."""
    train: Train

    @property
    def key(self) -> tuple[str, str, int]:
        """Task, variant and seed, which a part has once."""
        return self.task, self.variant, self.seed


@dataclass
class Result:
    """The measurements of a run."""

    task: str
    variant: str
    seed: int
    settings: Settings
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step's fresh completions."""
    tokens: list[int] = field(default_factory=list)
    """Generated tokens of each step, those of an evaluation excluded."""
    seconds: list[float] = field(default_factory=list)
    """Time of each step by the clock, which the machine's other work lengthens."""
    accuracy: float | None = None
    """Share of right answers on held-out prompts after the last step."""
    accuracy_error: float | None = None
    """Standard error of the accuracy, by prompt."""
    prompts: int = 0
    """Held-out prompts of the accuracy (n)."""
    samples: int = 0
    """Answers to each of these prompts, sampled at temperature 1; 0: one greedy answer."""
    processor_seconds: float = 0.0
    """Processor time of the run; that of a job group includes the start of its processes."""
    processor: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    """Further numbers of a part's own."""

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of the run that this is the result of."""
        return self.task, self.variant, self.seed

    @property
    def area(self) -> float:
        """Mean reward over all steps: the area under the reward curve, divided by its steps."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def final(self) -> float:
        """Mean reward of the last three steps."""
        return sum(self.rewards[-3:]) / len(self.rewards[-3:])


Results = Sequence[Result]


def runs_of(
    task: str, settings: Settings, seeds: Iterable[int], variants: Mapping[str, tuple[Settings, Train]]
) -> list[Run]:
    """Return the runs of a task seed by seed, so that an interruption leaves all variants with the same seeds.

    Each variant has its settings in addition to the task's, and the function that makes its runs.
    """
    return [
        Run(task, variant, seed, settings | own | {"SEED": str(seed), "DATA_SEED": str(seed)}, train)
        for seed in seeds
        for variant, (own, train) in variants.items()
    ]


@dataclass(frozen=True)
class Part:
    """A part of the page, whose text is in page.md."""

    name: str
    """The name in commands and in page.md, and of its files in docs/results/."""
    runs: Sequence[Run]
    """All runs, in the order in which they are made."""
    figures: Mapping[str, Callable[..., str]] = field(default_factory=dict)
    """Functions of this part's own for page.md: each gets the results, and the texts behind its name there."""

    def file(self, directory: Path | None = None) -> Path:
        """Return the file of the results in ``directory`` (None: KEPT), a line of JSON each."""
        return (directory or KEPT) / f"{self.name}.jsonl"

    def results(self, directory: Path | None = None) -> list[Result]:
        """Return the results that are kept of the part's runs, in the order of the runs."""
        kept = {result.key: result for result in (Result(**line) for line in read_records(self.file(directory)))}
        pairs = [(run, kept[run.key]) for run in self.runs if run.key in kept]
        return [result for run, result in pairs if _learned(result.settings) == _learned(run.settings)]

    def make(self, seeds: int | None = None, directory: Path | None = None) -> None:
        """Make the missing runs of a task's first ``seeds`` seeds (None: all), and add each to the file."""
        file = self.file(directory)
        present = {result.key for result in self.results(directory)}
        wanted = {
            (task, seed)
            for task in {run.task for run in self.runs}
            for seed in sorted({run.seed for run in self.runs if run.task == task})[:seeds]
        }
        missing = [run for run in self.runs if run.key not in present and (run.task, run.seed) in wanted]
        for number, run in enumerate(missing, start=1):
            result = run.train(run)
            result.processor = processor()
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab") as lines:
                lines.write(orjson.dumps(result) + b"\n")
            where = f"{self.name} {number}/{len(missing)}: {run.task}, {run.variant}, seed {run.seed}"
            harness.say(f"{where}: mean reward {result.area:.3f}, {result.processor_seconds:.0f} processor seconds")


def _learned(settings: Settings) -> Settings:
    return {name: value for name, value in settings.items() if name not in OF_THE_MACHINE}


def result_of(run: Run) -> Result:
    """Return a result without measurements, for ``Run.train`` to fill."""
    return Result(run.task, run.variant, run.seed, dict(run.settings))


def by_variant(results: Results, task: str) -> Mapping[str, list[Result]]:
    """Return the results of a task by variant, in their first order."""
    variants: dict[str, list[Result]] = {}
    for result in results:
        if result.task == task:
            variants.setdefault(result.variant, []).append(result)
    return variants


def commonest_processor(results: Results) -> str:
    """Return the processor that made most of the runs; seconds of different processors cannot be compared."""
    return Counter(result.processor for result in results).most_common(1)[0][0]


def processor() -> str:
    """Return the name of this machine's processor and the number of cores."""
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {cores()} cores"
