"""Markdown of results: tables of variants with medians, spreads and tests of equivalence."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence

from benchmarks.common.harness import spread
from benchmarks.results.equivalence import ACCURACY_MARGIN, AREA_MARGIN, Verdict, compare
from benchmarks.results.runs import Result, Results, by_variant

NEEDS_SEEDS = "needs two seeds"
"""The cell of a difference of variants that do not have two seeds in common."""


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table whose first column is aligned to the left and the others to the right."""
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def paragraph(text: str) -> str:
    """Return a sentence or more with the line breaks of a paragraph in a document."""
    return textwrap.fill(" ".join(text.split()), 126, break_long_words=False, break_on_hyphens=False)


def comparison(results: Results, task: str, base: str) -> str:
    """Return a table of a task's variants, each with its differences from the variant ``base``.

    A number is the median over the seeds with the least and the most. A difference is the mean over seeds with its 90%
    confidence interval and the verdict of the test of equivalence; without two seeds in common there is none.
    """
    variants = by_variant(results, task)
    rows = []
    for name, own in variants.items():
        others = variants.get(base, []) if name != base else []
        rows.append(
            (
                name,
                len(own),
                spread([result.area for result in own], 3),
                _cell(own, others, lambda result: result.area, AREA_MARGIN),
                spread([result.accuracy for result in own if result.accuracy is not None], 2),
                _cell(own, others, lambda result: result.accuracy, ACCURACY_MARGIN),
                f"{statistics.median(sum(result.tokens) for result in own):,.0f}",
                f"{statistics.median(result.processor_seconds for result in own):.0f}",
            )
        )
    return table(
        ("", "seeds", "mean reward", f"less {base}", "accuracy", f"less {base}", "tokens", "CPU s"),
        rows,
    )


def identical(results: Results, task: str, base: str) -> list[str]:
    """Return the variants whose rewards are those of ``base``, digit by digit, in every seed."""
    variants = by_variant(results, task)
    rewards = {result.seed: result.rewards for result in variants.get(base, [])}
    others = {name: own for name, own in variants.items() if name != base}
    return [name for name, own in others.items() if all(result.rewards == rewards.get(result.seed) for result in own)]


def ranking(results: Results, task: str, base: str) -> str:
    """Return how the variants of a task compare with ``base``, as the end of a sentence.

    It has their mean rewards, and the accuracies whose difference from that of ``base`` has a known sign.
    """
    variants = by_variant(results, task)
    found: dict[str, list[str]] = {}
    by_accuracy: dict[str, list[str]] = {}
    for name, own in variants.items():
        compared = compare(own, variants.get(base, []), lambda result: result.area, AREA_MARGIN)
        if compared is None or name == base:
            continue
        if name in identical(results, task, base):
            found.setdefault("the same to the last digit", []).append(name)
        elif compared.is_signed:
            found.setdefault("higher" if compared.mean > 0 else "lower", []).append(f"{name} ({compared.mean:+.3f})")
        else:
            outcome = f"equal within {AREA_MARGIN:g}" if compared.verdict is Verdict.EQUAL else "not told apart"
            found.setdefault(outcome, []).append(name)
        accuracies = compare(own, variants[base], lambda result: result.accuracy, ACCURACY_MARGIN)
        if accuracies is not None and accuracies.is_signed:
            outcome = f"accuracy {'higher' if accuracies.mean > 0 else 'lower'}"
            by_accuracy.setdefault(outcome, []).append(f"{name} ({accuracies.mean:+.2f})")
    found |= by_accuracy
    parts = [f"{outcome}: {names(found[outcome])}" for outcome in found]
    return "; ".join(parts)


def _cell(
    own: Sequence[Result], base: Sequence[Result], number: Callable[[Result], float | None], margin: float
) -> str:
    """Return the difference of ``own`` from ``base`` with its verdict; empty without numbers to compare."""
    compared = compare(own, base, number, margin)
    if compared is not None:
        return f"{compared}: {compared.verdict}"
    has_numbers = all(any(number(result) is not None for result in results) for results in (own, base))
    return NEEDS_SEEDS if has_numbers else ""


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
        f"Accuracy is the share of right answers among {answers} held-out prompts after the last step; "
        f"a single run's standard error is {statistics.median(errors):.3f}."
    )
