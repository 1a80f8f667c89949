"""Markdown of results: tables of variants with means, spreads and tests of equivalence."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Iterable, Sequence

from benchmarks.results.equivalence import ACCURACY, REWARD, Measure, Verdict, compare
from benchmarks.results.runs import Result, Results, by_variant, commonest_processor

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
    90% confidence interval; with too few pairs there is none.
    """
    variants = by_variant(results, task)
    measures = [
        one for one in (REWARD, ACCURACY) if any(one.of(run) is not None for own in variants.values() for run in own)
    ]
    processor = commonest_processor([run for own in variants.values() for run in own])
    rows = []
    for name, own in variants.items():
        others = variants.get(base, []) if name != base else []
        timed = [run.processor_seconds for run in own if run.processor == processor]
        cells: list[str] = []
        for measure in measures:
            values = [value for run in own if (value := measure.of(run)) is not None]
            cells += [spread(values, measure.digits), *_difference(own, others, measure)]
        tokens = f"{statistics.fmean(sum(run.tokens) for run in own):,.0f}"
        rows.append((name, len(own), *cells, tokens, f"{statistics.fmean(timed):.0f}" if timed else ""))
    compared = [column for measure in measures for column in (measure.name, f"difference from {base}", "verdict")]
    shown = table(("", "seeds", *compared, "tokens", "CPU s"), rows)
    return f"{shown}\n\nCPU seconds are means of the runs on {processor}."


def ranking(results: Results, task: str, base: str, measure: Measure = REWARD) -> str:
    """Return the verdicts on a task's variants beside ``base`` by a measure, as a sentence; "" without any."""
    variants = by_variant(results, task)
    found: dict[Verdict, list[str]] = {}
    for name, own in variants.items():
        compared = compare(own, variants.get(base, []), measure) if name != base else None
        if compared is not None:
            figure = "" if compared.verdict is Verdict.IDENTICAL else f" ({compared.mean:+.3f})"
            found.setdefault(compared.verdict, []).append(f"{name}{figure}")
    parts = [f"**{verdict}** {names(found[verdict])}" for verdict in Verdict if verdict in found]
    return f"{'; '.join(parts)}." if parts else ""


def _difference(own: Sequence[Result], base: Sequence[Result], measure: Measure) -> tuple[str, str]:
    """Return the difference of ``own`` from ``base`` and its verdict; empty without numbers to compare."""
    compared = compare(own, base, measure)
    if compared is not None:
        return "" if compared.is_identical else str(compared), str(compared.verdict)
    has_numbers = all(any(measure.of(result) is not None for result in results) for results in (own, base))
    return "", NEEDS_SEEDS if has_numbers else ""


def names(variants: Iterable[str]) -> str:
    """Return variants as an enumeration in a sentence."""
    *others, last = variants
    return f"{', '.join(others)} and {last}" if others else last


def accuracy_note(results: Sequence[Result]) -> str:
    """Return a sentence about the accuracy of a part's table: its prompts, samples and standard error."""
    measured = [result for result in results if result.accuracy is not None]
    if not measured:
        return ""
    n, k = measured[0].prompts, measured[0].samples
    errors = [result.accuracy_error for result in measured if result.accuracy_error is not None]
    answers = f"{k} sampled answers to each of {n}" if k else f"one greedy answer to each of {n}"
    return paragraph(
        f"Accuracy is the share of right answers among {answers} held-out prompts after the last step. A single run's "
        f"standard error over these prompts is {max(errors):.3f} at most."
    )
