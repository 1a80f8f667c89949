"""Make the runs of docs/results.md and write the page: ``python -m benchmarks.results [--only PART ...]``.

With ``--again DIRECTORY``, make the runs once more and say whether they agree with those of the page.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.harness import ROOT
from benchmarks.results.comparisons import (
    ACCURACY,
    FEWEST_PAIRS,
    REWARD,
    Measure,
    names,
    paragraph,
    spread,
    t_quantile,
    table,
)
from benchmarks.results.runs import Part, Result, Results
from services.core import logs

PAGE = ROOT / "docs/results.md"
COMMAND = ".venv/bin/python -m benchmarks.results --only"

PARTS = {
    "equal_ways": "ways:TINY_PART",
    "equal_ways_demo": "ways:DEMO_PART",
    "staleness": "off_policy:STALENESS_PART",
    "replay": "off_policy:REPLAY_PART",
    "rounding": "rounding:PART",
    "rounding_demo": "rounding:DEMO_PART",
    "methods": "methods:TINY_PART",
    "methods_demo": "methods:DEMO_PART",
    "hyperparameters": "sweeps:TINY_PART",
    "hyperparameters_demo": "sweeps:DEMO_PART",
    "tasks": "learned:TASK_PART",
    "episodes": "learned:EPISODE_PART",
    "beside_trl": "beside_trl:PART",
    "gsm8k": "learned:GSM8K_PART",
}
"""Each part's module and name in it, in the order of the page. The last part needs GSM8K, from the hub or as files."""

INTRODUCTION = """\
# Results

This page says what training learns. `make results` makes all runs and writes the page anew; `.venv/bin/python -m
benchmarks.results --only PART` makes one part's. Every run is a line of `docs/results/<part>.jsonl`, and [the end of
the page](#how-to-read-and-repeat-this) says how to repeat them and what the words mean."""

SUMMARY = """
Differences are of the mean reward over all steps of a run, which measures how fast a run learns, unless the sentence
says otherwise. The verdicts are tested by seed.
"""
CHANGED = """
Three changes moved numbers of this page. With one update a batch, no clip acts any more on tokens that an older policy
or an engine of another precision sampled. With groups four versions old, the clip cost 0.065 to 0.203 of the mean
reward, by the learning rate, and at the lowest most of the accuracy (0.09 instead of 0.24; [staleness](#staleness) has
both forms); with an engine in bfloat16 it cost GSPO 0.06 of the accuracy ([rounding](#rounding)). Weights in bfloat16
are published without bias, because rounding to the nearest took small updates back. Methods on the tiny task are
compared each at a learning rate of its own, because one rate for all ranked the sizes of their steps. The
hyperparameters, the methods on the demo's task and the comparison with TRL were made before; with one update on policy
in float32 their numbers change by rounding alone. At learning rates of 2e-3 and more, that can decide whether a single
run of the tiny task collapses.
"""

METHOD = """\
## How to read and repeat this

A line of the data has a run's settings and seed, the mean reward and the generated tokens of each step, the accuracy
on held-out prompts, and its processor time. An interrupted command goes on with the runs that are missing. To repeat
what is here, `--only PART --seeds 1 --again DIRECTORY` makes runs once more, into a directory, and says which agree
with these.

A number is the mean over seeds, with its range over the seeds in brackets. Lines of plots are means, too, in a band
from the least to the most. Variants are compared seed by seed: a seed fixes the prompts and their order, so that the
difference of two runs with one seed has less noise than either. Initial weights are the same in all seeds. Columns
"difference from BASE" have the mean difference with its 90% confidence interval (Student's t). Only runs of one seed
on one processor are a pair, because processors round sums differently. A table has the CPU seconds of one processor,
which it names.

The margins are {reward} for the mean reward of a run, set before the runs were made, and {accuracy} for the accuracy.
The latter was 0.1 at first. It was halved, and differences were tested at 95% instead of 90%, after most of these
data had been read; the one makes "equal" harder to reach, the other "higher" and "lower". Seconds in plots are by the
clock, and most of the runs had other work beside them.

- identical: the same to the last digit in every seed, for rewards at every step.
- equal: the 90% interval lies within the margin (a test of equivalence, two one-sided t-tests at 5%), and the 95%
  interval contains 0.
- slightly higher, slightly lower: the 90% interval lies within the margin, but the 95% interval excludes 0.
- higher, lower: the 95% interval excludes 0, and the 90% interval reaches beyond the margin.
- open: the 95% interval contains 0, and the 90% interval reaches beyond the margin, so these seeds cannot tell.
- needs seeds: fewer than {pairs} pairs.

A seed has learned a task if the 95% interval of its gain in accuracy on held-out prompts, by Newcombe's hybrid score,
is above 0. At first the intervals of the two accuracies were not to overlap, which asks for more; that was changed
after these data had been read.

Where two variants do not differ, one 95% interval in twenty excludes 0 by chance, and this page has dozens of
intervals. The tiny task's base has the same runs in several parts: they are `synchronous` and `one process`, `no lag`,
`no replay`, `float32 engine`, `defaults` and `this project`."""


def load_parts(names: Iterable[str] = PARTS) -> list[Part]:
    """Return the parts with these names, in the order of the page."""
    found = []
    for name in PARTS:
        if name in names:
            module, _, variable = PARTS[name].partition(":")
            found.append(getattr(import_module(f"benchmarks.results.{module}"), variable))
    return found


def page(parts: Sequence[Part]) -> str:
    """Return the text of the page and write its plots."""
    made = [(part, part.results()) for part in parts]
    sentences = [f"- {sentence}" for part, results in made if results for sentence in part.summary(results)]
    sections = [section(part, results) for part, results in made if results]
    missing = [part for part, results in made if not results]
    method = METHOD.format(reward=f"{REWARD.margin:g}", accuracy=f"{ACCURACY.margin:g}", pairs=FEWEST_PAIRS)
    summary = ["## Summary", paragraph(SUMMARY), paragraph(CHANGED), "\n".join(sentences)]
    blocks = [*filled(INTRODUCTION), *summary, *sections, *not_run(missing)]
    return "\n\n".join([*blocks, *filled(method)]) + "\n"


def filled(text: str) -> list[str]:
    """Return the blocks of a text, with the line breaks of a document in all but lists."""
    return [block if block.startswith(("- ", "#")) else paragraph(block) for block in text.split("\n\n")]


def section(part: Part, results: Results) -> str:
    """Return a part's heading, how to repeat it, and its text."""
    return f"## {part.title}\n\n{provenance(part, results, f'`{COMMAND} {part.name}`')}\n\n{part.show(results)}"


def not_run(parts: Sequence[Part]) -> list[str]:
    """Return a section with the command that makes the runs of parts without any; none without such parts."""
    if not parts:
        return []
    titles, command = names(part.title for part in parts), f"`{COMMAND} {' '.join(part.name for part in parts)}`"
    return [f"## Not run here\n\n{paragraph(f'{command} makes the runs of {titles}.')}"]


def provenance(part: Part, results: Results, command: str) -> str:
    """Return a paragraph with command, runs, seeds, steps, and processor time by processor, of a part."""
    seeds = ", ".join(map(str, sorted({result.seed for result in results}))) + _lacking_seeds(results)
    steps = sorted({len(result.rewards) for result in results})
    lengths = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
    runs = len(results)
    of = "" if runs == len(part.runs) else f" of {len(part.runs)} (the command makes the others)"
    costs = []
    for processor in sorted({result.processor for result in results}):
        seconds = [result.processor_seconds for result in results if result.processor == processor]
        each = f"{sum(seconds) / 60:.0f} CPU minutes, {statistics.fmean(seconds):.0f} CPU seconds a run"
        costs.append(f"{len(seconds)} on {processor} ({each})")
    return paragraph(
        f"{command}: {runs} runs{of}, seeds: {seeds}; {lengths} steps; {' and '.join(costs)}. "
        f"Data: [`{part.name}.jsonl`](results/{part.name}.jsonl)."
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


COVERAGE = 0.95
"""The chance that a mean of new seeds lies in the prediction interval."""
COLUMNS = ("part", "task", "variant", "measure", "kept", "again", "verdict")


def report(parts: Sequence[Part], directory: Path) -> str:
    """Compare the runs in ``directory`` with the kept ones in a table, and say how many of its rows agree."""
    rows = [row for part in parts for row in compared(part.name, part.results(), part.results(directory))]
    apart = sum(row[-1] == "apart" for row in rows)
    agreement = f"""
    {len(rows) - apart} of {len(rows)} rows agree with docs/results: they are identical, equal within the page's margin,
    or inside the {COVERAGE:.0%} prediction interval of the kept runs, which one row in twenty misses by chance.
    """
    return f"{table(COLUMNS, rows)}\n\n{paragraph(agreement)}"


def compared(part: str, kept: Results, again: Results) -> list[tuple[str, ...]]:
    """Return a row for each task, variant and measure that both have, in the order of the kept runs."""
    rows = []
    for task, variant in dict.fromkeys((result.task, result.variant) for result in kept):
        own, new = (
            [result for result in results if (result.task, result.variant) == (task, variant)]
            for results in (kept, again)
        )
        for measure in (REWARD, ACCURACY):
            before, after = ([v for result in group if (v := measure.of(result)) is not None] for group in (own, new))
            if before and after:
                cells = (spread(values, measure.digits) for values in (before, after))
                rows.append((part, task, variant, measure.name, *cells, verdict(own, new, measure)))
    return rows


def verdict(kept: Results, again: Results, measure: Measure) -> str:
    """Say whether new runs of a variant agree with the kept ones by a measure.

    Runs with a common seed are "identical" if they have the same numbers to the last digit. Otherwise the means are
    "equal" if they differ by less than the margin, "within the spread" if the new mean lies in the prediction interval
    of the kept values (Student's t, mean +- t s sqrt(1/n + 1/m)), else "apart".
    """
    by_seed = {result.seed: result for result in kept}
    pairs = [(by_seed[result.seed], result) for result in again if result.seed in by_seed]
    if pairs and all(measure.exact(one) == measure.exact(other) for one, other in pairs):
        return "identical"
    before, after = (_values(results, measure) for results in (kept, again))
    difference = abs(statistics.fmean(after) - statistics.fmean(before))
    if difference < measure.margin:
        return "equal"
    if len(before) < 2:
        return "apart"
    half = t_quantile((1 + COVERAGE) / 2, len(before) - 1) * statistics.stdev(before)
    return "within the spread" if difference <= half * math.sqrt(1 / len(before) + 1 / len(after)) else "apart"


def _values(results: Sequence[Result], measure: Measure) -> list[float]:
    return [value for result in results if (value := measure.of(result)) is not None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, make the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seeds", type=int, help="make the runs of the first SEEDS seeds only; by default of all")
    parser.add_argument("--page-only", action="store_true", help="make no runs, write the page of those that are kept")
    parser.add_argument(
        "--again",
        type=Path,
        metavar="DIRECTORY",
        help="make the runs once more, into a directory, from which an interrupted command continues; compare them "
        "with those that are kept, and write no page",
    )
    given = parser.parse_args(arguments)
    harness.end_in_order()
    logs.configure("results", "warning")
    # Several threads would compute other sums, and a tiny model gains nothing by them.
    torch.set_num_threads(1)
    parts = load_parts(given.only)
    for part in [] if given.page_only else parts:
        part.make(given.seeds, given.again)
    if given.again:
        print(report(parts, given.again))
    else:
        PAGE.write_text(page(load_parts()))


if __name__ == "__main__":
    main()
