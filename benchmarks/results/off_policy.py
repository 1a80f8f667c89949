"""The costs of groups of older policies: the updates that a lag needs, and the processor time of replay."""

from __future__ import annotations

import math
import statistics

from benchmarks.results.comparisons import spread, table
from benchmarks.results.in_process import STEP_SECONDS
from benchmarks.results.runs import Result, Results, by_variant, commonest_processor

LAGS = {"no lag": 0, "lag 1": 1, "lag 2": 2, "lag 4": 4}
NO_LAG = "no lag"
LEVEL, WINDOW = 0.6, 3
"""``versions_until`` waits until the mean reward of WINDOW steps is LEVEL."""


def staleness(results: Results) -> str:
    """Return the mean staleness of each asynchronous way's runs, and its spread over the seeds."""
    by_bound: dict[str, list[float]] = {}
    for result in results:
        if result.variant.startswith("asynchronous"):
            by_bound.setdefault(result.variant[-1], []).append(result.figures["staleness"])
    return ", ".join(f"{spread(values, 1)} of {allowed} allowed" for allowed, values in by_bound.items())


def versions_until(result: Result, lag: int) -> float:
    """Return how many updates made the policy whose mean reward over WINDOW steps is LEVEL; infinity if none did."""
    for end in range(WINDOW, len(result.rewards) + 1):
        if statistics.fmean(result.rewards[end - WINDOW : end]) >= LEVEL:
            return max(end - 1 - lag, 0)
    return math.inf


def updates_needed(results: Results, task: str) -> dict[str, list[float]]:
    """Return ``versions_until`` of each run by lag."""
    variants = by_variant(results, task)
    return {
        name: [versions_until(result, lag) for result in variants[name]]
        for name, lag in LAGS.items()
        if name in variants
    }


def break_even(results: Results, task: str) -> str:
    """Return a table of the updates that each lag needs, and of where an asynchronous run is sooner for it."""
    needed, rows = updates_needed(results, task), []
    for name, counts in needed.items():
        times = statistics.fmean(counts) / statistics.fmean(needed[NO_LAG])
        if math.isfinite(times):
            share = f"{max(times - 1, 0):.0%}" if name != NO_LAG else ""
            rows.append((name, f"{statistics.fmean(counts):.1f}", f"{times:.2f}", share))
        else:
            rows.append((name, "not in every seed", "", ""))
    columns = (f"updates until a reward of {LEVEL:g}", f"times {NO_LAG}", "least share of the shorter phase")
    return table(("", *columns), rows)


def multiple(results: Results, task: str, lag: str) -> str:
    """Return the updates that a lag needs, as multiples of those of no lag by seed."""
    needed = updates_needed(results, task)
    return spread([updates / base for updates, base in zip(needed[lag], needed[NO_LAG], strict=True)])


def costs(results: Results, task: str) -> str:
    """Return a table of the steps' processor time and the groups that were replayed, by variant."""
    processor = commonest_processor(results)
    rows = []
    for variant, runs in by_variant(results, task).items():
        seconds = [run.figures[STEP_SECONDS] for run in runs if run.processor == processor]
        counts = [spread([run.figures[name] for run in runs], 0) for name in ("replayed", "left_out")]
        rows.append((variant, len(runs[0].rewards), spread(seconds, 1), *counts))
    return table(("", "steps", "CPU seconds of the steps", "groups replayed", "left out by their KL"), rows)
