"""Comparisons of variants seed by seed, as tests and as tables.

Two variants are equal within a margin if the 90% confidence interval of their mean difference lies between minus and
plus the margin: two one-sided t-tests at 5% (Schuirmann 1987, doi:10.1007/BF01068419). They differ if the 95%
interval excludes 0. An interval that contains 0 alone proves nothing: few seeds make it wide.
"""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import numpy as np

from benchmarks.results.runs import Result, Results, by_variant, commonest_processor

LEVEL = 0.05
"""The chance of calling two variants equal whose difference is the margin, or different that are not."""
FEWEST_PAIRS = 3
"""Fewest seeds that two variants must have in common to be compared."""


@dataclass(frozen=True)
class Measure:
    """A number of a run by which variants are compared."""

    name: str
    of: Callable[[Result], float | None]
    margin: float
    digits: int
    """Digits behind the point in tables."""
    exact: Callable[[Result], object]
    """Returns what identical runs have in common to the last digit."""


REWARD = Measure("mean reward", lambda result: result.area, 0.02, 3, lambda result: result.rewards)
"""The mean reward over all steps."""
ACCURACY = Measure(
    "accuracy", lambda result: result.accuracy, 0.05, 2, lambda result: (result.rewards, result.accuracy)
)
"""The accuracy on held-out prompts."""
MEASURES = {measure.name: measure for measure in (REWARD, ACCURACY)}


class Verdict(StrEnum):
    """The outcome of a comparison, in the words of the page."""

    IDENTICAL = "identical"
    """The same to the last digit in every seed."""
    EQUAL = "equal"
    """The 90% interval lies within the margin, and the 95% interval contains 0."""
    SLIGHTLY_HIGHER = "slightly higher"
    """The 90% interval lies within the margin, and the 95% interval above 0."""
    SLIGHTLY_LOWER = "slightly lower"
    """The 90% interval lies within the margin, and the 95% interval below 0."""
    HIGHER = "higher"
    """The 95% interval lies above 0, and the 90% interval reaches beyond the margin."""
    LOWER = "lower"
    """The 95% interval lies below 0, and the 90% interval reaches beyond the margin."""
    OPEN = "open"
    """The 95% interval contains 0, and the 90% interval reaches beyond the margin."""


@dataclass(frozen=True)
class Comparison:
    """The mean difference of two variants over the seeds that both have on one processor."""

    pairs: int
    mean: float
    error: float
    """Standard error of the mean."""
    margin: float
    is_identical: bool = False
    """True if both have the same numbers to the last digit in every seed."""

    @property
    def verdict(self) -> Verdict:
        """The outcome, by where the intervals lie."""
        if self.is_identical:
            return Verdict.IDENTICAL
        low, high = self.interval(1 - LEVEL)
        is_higher, is_lower = low > 0, high < 0
        low, high = self.interval(1 - 2 * LEVEL)
        if -self.margin < low and high < self.margin:
            if is_higher:
                return Verdict.SLIGHTLY_HIGHER
            return Verdict.SLIGHTLY_LOWER if is_lower else Verdict.EQUAL
        if is_higher:
            return Verdict.HIGHER
        return Verdict.LOWER if is_lower else Verdict.OPEN

    def interval(self, confidence: float) -> tuple[float, float]:
        """Return the ends of the confidence interval of the mean (Student's t)."""
        half = t_quantile((1 + confidence) / 2, self.pairs - 1) * self.error
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        low, high = self.interval(1 - 2 * LEVEL)
        return f"{self.mean:+.3f} ({low:+.3f} to {high:+.3f})"


def compare(runs: Sequence[Result], base: Sequence[Result], measure: Measure) -> Comparison | None:
    """Return how a measure of ``own`` differs from that of ``base``; None with fewer than FEWEST_PAIRS common seeds.

    Only runs with the same seed on the same processor are a pair, because processors round sums differently.
    """
    others = {(result.seed, result.processor): result for result in base}
    results_of_both = [(result, others.get((result.seed, result.processor))) for result in runs]
    pairs = [(result, other) for result, other in results_of_both if other is not None]
    numbers = [(measure.of(result), measure.of(other)) for result, other in pairs]
    differences = [a - b for a, b in numbers if a is not None and b is not None]
    count = len(differences)
    if count < FEWEST_PAIRS:
        return None
    error = statistics.stdev(differences) / math.sqrt(count)
    is_identical = all(measure.exact(result) == measure.exact(other) for result, other in pairs)
    return Comparison(count, statistics.fmean(differences), error, measure.margin, is_identical)


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, to about four digits.

    With t = sqrt(degrees) tan(a), the density is proportional to cos(a)^(degrees - 1) on -pi/2 < a < pi/2, a finite
    interval over which it is summed.
    """
    angles = np.linspace(-math.pi / 2, math.pi / 2, 200_001)
    middles = (angles[1:] + angles[:-1]) / 2
    below = np.concatenate([[0.0], np.cumsum(np.cos(middles) ** (degrees - 1))])
    return math.sqrt(degrees) * math.tan(float(np.interp(probability, below / below[-1], angles)))


NEEDS_SEEDS = "needs seeds"
"""The verdict on variants with fewer common seeds on one processor than a comparison takes."""


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table whose first column is aligned to the left and the others to the right."""
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def paragraph(text: str) -> str:
    """Return a sentence or more with the line breaks of a paragraph in a document."""
    return textwrap.fill(" ".join(text.split()), 126, break_long_words=False, break_on_hyphens=False)


def anchor(title: str) -> str:
    """Return the name by which links lead to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean, and the least and the most of several values, as text; "" without values."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else mean


def comparison(results: Results, task: str, base: str) -> str:
    """Return a table of a task's variants, each with its differences from the variant ``base``, and a note on CPU time.

    A number is the mean over the seeds with the least and the most. A difference is the mean over the pairs with its
    90% confidence interval; with too few pairs there is none. Without results of the task there is no table.
    """
    variants = by_variant(results, task)
    if not variants:
        return ""
    measures = [
        one for one in (REWARD, ACCURACY) if any(one.of(run) is not None for runs in variants.values() for run in runs)
    ]
    processor = commonest_processor([run for runs in variants.values() for run in runs])
    rows = []
    for name, runs in variants.items():
        others = variants.get(base, []) if name != base else []
        timed = [run.processor_seconds for run in runs if run.processor == processor]
        cells: list[str] = []
        for measure in measures:
            values = [value for run in runs if (value := measure.of(run)) is not None]
            cells += [spread(values, measure.digits), *_difference(runs, others, measure)]
        tokens = f"{statistics.fmean(sum(run.tokens) for run in runs):,.0f}"
        rows.append((name, len(runs), *cells, tokens, f"{statistics.fmean(timed):.0f}" if timed else ""))
    compared = [column for measure in measures for column in (measure.name, f"difference from {base}", "verdict")]
    shown = table(("", "seeds", *compared, "tokens", "CPU s"), rows)
    return f"{shown}\n\nCPU seconds are means of the runs on {processor}."


def ranking(results: Results, task: str, base: str, measure: str = REWARD.name, left_out: str = "") -> str:
    """Return the verdicts on a task's variants compared with ``base`` by a measure, as a sentence; "" without any."""
    variants = by_variant(results, task)
    by_verdict: dict[Verdict, list[str]] = {}
    for name, runs in variants.items():
        is_compared = name not in (base, left_out)
        compared = compare(runs, variants.get(base, []), MEASURES[measure]) if is_compared else None
        if compared is not None:
            figure = "" if compared.verdict is Verdict.IDENTICAL else f" ({compared.mean:+.3f})"
            by_verdict.setdefault(compared.verdict, []).append(f"{name}{figure}")
    parts = [f"**{verdict}** {names(by_verdict[verdict])}" for verdict in Verdict if verdict in by_verdict]
    return f"{'; '.join(parts)}." if parts else ""


def _difference(runs: Sequence[Result], base: Sequence[Result], measure: Measure) -> tuple[str, str]:
    """Return the difference of ``own`` from ``base`` and its verdict; empty without numbers to compare."""
    compared = compare(runs, base, measure)
    if compared is not None:
        return "" if compared.is_identical else str(compared), str(compared.verdict)
    has_numbers = all(any(measure.of(result) is not None for result in results) for results in (runs, base))
    return "", NEEDS_SEEDS if has_numbers else ""


def names(variants: Iterable[str]) -> str:
    """Return variants as an enumeration in a sentence."""
    *others, last = variants
    return f"{', '.join(others)} and {last}" if others else last


def verdict(results: Results, task: str, variant: str, other_task: str, base: str, measure: str = REWARD.name) -> str:
    """Return the verdict on a variant of a task compared with one of another; "" with too few pairs."""
    compared = _compared(results, task, variant, other_task, base, measure)
    return str(compared.verdict) if compared else ""


def difference(
    results: Results, task: str, variant: str, other_task: str, base: str, measure: str = REWARD.name
) -> str:
    """Return the difference of a variant of a task from one of another with its interval; "" with too few pairs."""
    compared = _compared(results, task, variant, other_task, base, measure)
    return str(compared) if compared else ""


def _compared(results: Results, task: str, variant: str, other_task: str, base: str, measure: str) -> Comparison | None:
    runs, other = by_variant(results, task).get(variant, []), by_variant(results, other_task).get(base, [])
    return compare(runs, other, MEASURES[measure])


def mean_figure(results: Results, figure: str, task: str, variant: str) -> str:
    """Return the mean of a figure over a variant's runs; "" without any."""
    values = [run.figures[figure] for run in by_variant(results, task).get(variant, [])]
    return f"{statistics.fmean(values):.2f}" if values else ""


def accuracy_note(results: Results, task: str = "") -> str:
    """Return a sentence about the accuracy of a part's table, or a task's: its prompts, samples and standard error."""
    measured = [run for run in results if run.accuracy is not None and task in ("", run.task) and len(run.rewards) > 1]
    if not measured:
        return ""
    n, k = measured[0].prompts, measured[0].samples
    errors = [result.accuracy_error for result in measured if result.accuracy_error is not None]
    answers = f"{k} sampled answers to each of {n}" if k else f"one greedy answer to each of {n}"
    return paragraph(
        f"Accuracy is the share of right answers among {answers} held-out prompts after the last step. A single run's "
        f"standard error over these prompts is {max(errors):.3f} at most."
    )
