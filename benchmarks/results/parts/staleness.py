"""Stale tokens on the tiny task: how much an older sampling policy costs, and which correction holds it."""

from __future__ import annotations

import math
import statistics
from functools import partial

from benchmarks.results import in_process
from benchmarks.results.equivalence import ACCURACY, REWARD
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, Run, Settings, by_variant
from benchmarks.results.tables import accuracy_note, anchor, comparison, paragraph, ranking, spread, table
from benchmarks.results.tasks import TINY, seeded

TITLE = "Staleness"
SEEDS = range(5)
OWN, STALE = "no lag", "lag 4"
OWN_RATE = "5e-4"
AROUND_SAMPLER: Settings = {"IMPORTANCE_CORRECTION": "none"}
"""The ratio is against the policy that sampled, and the clip is around it."""
CLIPPED = "clipped around the policy that sampled"

BY_LAG: dict[str, tuple[int, Settings]] = {
    OWN: (0, {}),
    "lag 1": (1, {}),
    "lag 2": (2, {}),
    STALE: (4, {}),
    f"lag 1, {CLIPPED}": (1, AROUND_SAMPLER),
    f"lag 2, {CLIPPED}": (2, AROUND_SAMPLER),
    f"lag 4, {CLIPPED}": (4, AROUND_SAMPLER),
    "lag 4, CISPO": (4, {"LOSS": "cispo"}),
    "lag 4, IcePop": (4, {"IMPORTANCE_CORRECTION": "icepop"}),
}
BY_BOUND: dict[str, tuple[int, Settings]] = {
    OWN: (0, {}),
    STALE: (4, {}),
    f"lag 4, {CLIPPED}": (4, AROUND_SAMPLER),
    **{f"lag 4, weights up to {cap}": (4, {"IMPORTANCE_CAP": cap}) for cap in ("1", "3", "5")},
    "lag 4, IcePop": (4, {"IMPORTANCE_CORRECTION": "icepop"}),
    **{f"lag 4, KL up to {bound}": (4, {"OFF_POLICY_MAX_KL": bound}) for bound in ("0.1", "0.5")},
}
TASKS: dict[str, dict[str, tuple[int, Settings]]] = {OWN_RATE: BY_LAG, "2e-3": BY_BOUND, "4e-3": BY_BOUND}
"""The variants at each learning rate, as lags with settings."""

RUNS = [
    Run(
        f"learning rate {rate}",
        variant,
        seed,
        seeded(TINY | {"LEARNING_RATE": rate} | settings, seed),
        partial(in_process.train, lag=lag),
    )
    for seed in SEEDS
    for rate, variants in TASKS.items()
    for variant, (lag, settings) in variants.items()
]

LEVEL, WINDOW = 0.6, 3
"""The mean reward of so many steps that ``versions_until`` waits for."""


def versions_until(result: Result, lag: int) -> float:
    """Return how many updates made the policy whose mean reward over WINDOW steps is LEVEL; infinity if none did."""
    for end in range(WINDOW, len(result.rewards) + 1):
        if statistics.fmean(result.rewards[end - WINDOW : end]) >= LEVEL:
            return max(end - 1 - lag, 0)
    return math.inf


def updates_needed(results: Results) -> dict[str, list[float]]:
    """Return ``versions_until`` of each run by lag, with the default correction at the task's own learning rate."""
    variants = by_variant(results, f"learning rate {OWN_RATE}")
    return {
        name: [versions_until(result, lag) for result in variants[name]]
        for name, (lag, settings) in BY_LAG.items()
        if not settings and name in variants
    }


def factor(needed: dict[str, list[float]], name: str) -> float:
    """Return how many times the updates of a run without lag a lag needs; infinity if a run did not get there."""
    return statistics.fmean(needed[name]) / statistics.fmean(needed[OWN])


def break_even(results: Results) -> str:
    """Return a table of the updates that each lag needs, and of where an asynchronous run is sooner for it."""
    needed, rows = updates_needed(results), []
    for name, counts in needed.items():
        if math.isfinite(times := factor(needed, name)):
            share = f"{max(times - 1, 0):.0%}" if name != OWN else ""
            rows.append((name, f"{statistics.fmean(counts):.1f}", f"{times:.2f}", share))
        else:
            rows.append((name, "not in every seed", "", ""))
    columns = (f"updates until a reward of {LEVEL:g}", f"times {OWN}", "least share of the shorter phase")
    return table(("", *columns), rows)


def show(results: Results) -> str:
    """Return the section: costs of staleness, the break-even of asynchronous runs, and bounds at high rates."""
    text = """
    The tiny task in one process, where the engine serves the weights of so many steps ago. This emulates an
    asynchronous run whose groups are all of that age; [equal ways](#equal-ways) has real ones. A step's reward is that
    of the older policy that sampled, so a lag lowers the mean reward by itself; the accuracy is that of the last
    policy. With one update a batch the proximal policy is the trainer's own, its ratio is 1, and the truncated weight
    min(rho, 2) of the trainer's policy against the one that sampled corrects alone. `clipped around the policy that
    sampled` is `IMPORTANCE_CORRECTION=none`: the clip of 0.2 bounds the ratio to the policy that sampled.
    """
    waits = """
    A synchronous step takes the time of generation plus that of training; an asynchronous one at best the longer of
    the two, and it needs more updates. So asynchronous training reaches the reward sooner only where the shorter of
    the two takes at least this share of the longer:
    """
    bounds = """
    At high learning rates four steps change the policy much. These are the bounds that can hold stale tokens: the
    largest weight (`IMPORTANCE_CAP`, 2 by default), IcePop, which leaves out tokens with a weight outside 0.5 to 5,
    and `OFF_POLICY_MAX_KL`. Single runs collapse at such rates, so the intervals of accuracies are wide. The mean
    reward without lag is higher by its first four steps alone, which a lag spends with the first policy.
    """
    rates = [rate for rate in TASKS if any(result.task == f"learning rate {rate}" for result in results)]
    parts = [paragraph(text)]
    for rate in rates:
        task = f"learning rate {rate}"
        if TASKS[rate] is BY_LAG:
            plot = curves("staleness", results, task, TITLE)
            parts += [comparison(results, task, OWN), accuracy_note(results), paragraph(waits), break_even(results)]
            parts += [plot, paragraph(bounds)]
        else:
            parts += [f"### {TITLE}: {task}", comparison(results, task, STALE)]
    return "\n\n".join(parts)


def summary(results: Results) -> list[str]:
    """Return the sentences of the summary: the accuracy at the own rate, the mean reward at high ones, the updates."""
    link = f"[{TITLE}](#{anchor(TITLE)})"
    sentences = []
    for rate, variants in TASKS.items():
        base, measure = (OWN, ACCURACY) if variants is BY_LAG else (STALE, REWARD)
        # Beside a lag, a run without one has a higher mean reward by its first steps alone.
        compared = [result for result in results if base == OWN or result.variant != OWN]
        order = ranking(compared, f"learning rate {rate}", base, measure)
        if order:
            sentences.append(f"{link}, learning rate {rate}, {measure.name} beside {base}: {order}")
    needed = updates_needed(results)
    if STALE in needed:
        multiples = {
            name: spread([own / base for own, base in zip(needed[name], needed[OWN], strict=True)])
            for name in (STALE, "lag 1")
        }
        sentences.append(
            f"{link}, learning rate {OWN_RATE}, updates until a reward of {LEVEL:g}, as multiples of those of {OWN} by "
            f"seed: {', '.join(f'{name} {multiple}' for name, multiple in multiples.items())}."
        )
    return sentences


PART = Part("staleness", TITLE, RUNS, show, summary)
