"""docs/results.md: what the command measures, a summary, and a section for each part."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from importlib import import_module

from benchmarks.common.harness import ROOT
from benchmarks.results.equivalence import ACCURACY_MARGIN, AREA_MARGIN
from benchmarks.results.runs import Part, Results
from benchmarks.results.tables import paragraph

PAGE = ROOT / "docs/results.md"

NAMES = (
    "equal_ways",
    "methods",
    "methods_demo",
    "hyperparameters",
    "hyperparameters_demo",
    "tasks",
    "episodes",
    "beside_trl",
    "gsm8k",
)
"""Modules of benchmarks/results/parts, in the order of the page. The last needs GSM8K, from the hub or as files."""

INTRODUCTION = """\
# Results

This page says what training learns, with the data behind every figure. `make results` makes all runs and writes the
page anew; `.venv/bin/python -m benchmarks.results --only PART` makes one part's. An interrupted command goes on with
the runs that are missing. Every run is a line of `docs/results/<part>.jsonl`: its settings, its seed, the mean reward
and the generated tokens of each step, the accuracy on held-out prompts, its processor time.

Numbers are medians over seeds with the least and the most. Variants are compared seed by seed: a seed fixes the
prompts and their order, so that the difference of two runs with one seed has less noise than either. "Equal" is the
outcome of a test of equivalence (two one-sided t-tests at the 5% level): the 90% confidence interval of the mean
difference lies within a margin, {area} for the mean reward of a run and {accuracy} for the accuracy, both stated
before the runs were made. "Different" means that the whole interval lies beyond the margin, "open" that these seeds
cannot tell. A row that shares fewer than two seeds with the base has no test, and says "needs two seeds"."""


def load_parts(names: Sequence[str] = NAMES) -> list[Part]:
    """Return the parts with these names, in the order of the page."""
    return [import_module(f"benchmarks.results.parts.{name}").PART for name in NAMES if name in names]


def page(parts: Sequence[Part]) -> str:
    """Return the text of the page and write its plots."""
    made = [(part, part.results()) for part in parts]
    sentences = [f"- {sentence}" for part, results in made if results for sentence in part.summary(results)]
    sections = [section(part, results) for part, results in made]
    text = INTRODUCTION.format(area=f"{AREA_MARGIN:g}", accuracy=f"{ACCURACY_MARGIN:g}")
    introduction = [paragraph(one) for one in text.split("\n\n")]
    return "\n\n".join([*introduction, "## Summary", "\n".join(sentences), *sections]) + "\n"


def section(part: Part, results: Results) -> str:
    """Return a part's heading, how to repeat it, and its text."""
    command = f"`.venv/bin/python -m benchmarks.results --only {part.name}`"
    if not results:
        return f"## {part.title}\n\nNo runs are kept here; {command} makes them."
    return f"## {part.title}\n\n{provenance(part, results, command)}\n\n{part.show(results)}"


def provenance(part: Part, results: Results, command: str) -> str:
    """Return a paragraph with command, runs, seeds, steps, processor time and processors of a part."""
    seeds = ", ".join(map(str, sorted({result.seed for result in results}))) + _lacking_seeds(results)
    steps = sorted({len(result.rewards) for result in results})
    minutes = sum(result.processor_seconds for result in results) / 60
    processors = sorted({result.processor for result in results})
    runs = len(results)
    of = "" if runs == len(part.runs) else f" of {len(part.runs)} (the command makes the others)"
    each = statistics.median(result.processor_seconds for result in results)
    return paragraph(
        f"{command}: {runs} runs{of}, seeds: {seeds}; {' or '.join(map(str, steps))} steps; "
        f"{minutes:.0f} processor minutes in all, {each:.0f} seconds a run; {'; '.join(processors)}. "
        f"Data: [`{part.file.name}`](results/{part.file.name})."
    )


def _lacking_seeds(results: Results) -> str:
    """Return a remark in brackets on the variants that lack seeds which others of their task have, or nothing."""
    seeds: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for result in results:
        seeds[result.task][result.variant].add(result.seed)
    numbers = [
        len(own)
        for variants in seeds.values()
        for own in variants.values()
        if len(own) < len(set().union(*variants.values()))
    ]
    return f" (variants with fewer: {len(numbers)}, the least has {min(numbers)})" if numbers else ""
