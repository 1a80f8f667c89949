"""The runs of the page made once more, beside those that are kept: what a stranger's machine repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results.equivalence import ACCURACY, REWARD, Measure, t_quantile
from benchmarks.results.runs import Part, Result, Results
from benchmarks.results.tables import paragraph, spread, table

COVERAGE = 0.95
"""The chance that a mean of new seeds lies in the prediction interval."""
COLUMNS = ("part", "task", "variant", "measure", "kept", "again", "verdict")


def report(parts: Sequence[Part], directory: Path) -> str:
    """Return a table of the runs in ``directory`` beside the kept ones, and how many of its rows agree."""
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
