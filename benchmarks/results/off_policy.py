"""Groups of older policies on the tiny and the demo's task: the cost of staleness, and of replay."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from functools import partial

from benchmarks.results import in_process
from benchmarks.results.comparisons import (
    ACCURACY,
    REWARD,
    accuracy_note,
    anchor,
    comparison,
    paragraph,
    ranking,
    spread,
    table,
)
from benchmarks.results.in_process import STEP_SECONDS
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, Run, Settings, by_variant, commonest_processor
from benchmarks.results.tasks import DEMO_TASK, TINY, seeded

STALENESS_TITLE = "Staleness"
STALENESS_SEEDS = range(5)
NO_LAG, STALE = "no lag", "lag 4"
OWN_RATE = "5e-4"
AROUND_SAMPLER: Settings = {"IMPORTANCE_CORRECTION": "none"}
"""The ratio is against the policy that sampled, and the clip is around it."""
CLIPPED = "clipped around the policy that sampled"

BY_LAG: dict[str, tuple[int, Settings]] = {
    NO_LAG: (0, {}),
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
    NO_LAG: (0, {}),
    STALE: (4, {}),
    f"lag 4, {CLIPPED}": (4, AROUND_SAMPLER),
    **{f"lag 4, weights up to {cap}": (4, {"IMPORTANCE_CAP": cap}) for cap in ("1", "3", "5")},
    "lag 4, IcePop": (4, {"IMPORTANCE_CORRECTION": "icepop"}),
    **{f"lag 4, KL up to {bound}": (4, {"OFF_POLICY_MAX_KL": bound}) for bound in ("0.1", "0.5")},
}
STALENESS_TASKS: dict[str, dict[str, tuple[int, Settings]]] = {OWN_RATE: BY_LAG, "2e-3": BY_BOUND, "4e-3": BY_BOUND}
"""The variants at each learning rate, as lags with settings."""

STALENESS_RUNS = [
    Run(
        f"learning rate {rate}",
        variant,
        seed,
        seeded(TINY | {"LEARNING_RATE": rate} | settings, seed),
        partial(in_process.train, lag=lag),
    )
    for seed in STALENESS_SEEDS
    for rate, variants in STALENESS_TASKS.items()
    for variant, (lag, settings) in variants.items()
]

LEVEL, WINDOW = 0.6, 3
"""``versions_until`` waits until the mean reward of WINDOW steps is LEVEL."""


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
    return statistics.fmean(needed[name]) / statistics.fmean(needed[NO_LAG])


def break_even(results: Results) -> str:
    """Return a table of the updates that each lag needs, and of where an asynchronous run is sooner for it."""
    needed, rows = updates_needed(results), []
    for name, counts in needed.items():
        if math.isfinite(times := factor(needed, name)):
            share = f"{max(times - 1, 0):.0%}" if name != NO_LAG else ""
            rows.append((name, f"{statistics.fmean(counts):.1f}", f"{times:.2f}", share))
        else:
            rows.append((name, "not in every seed", "", ""))
    columns = (f"updates until a reward of {LEVEL:g}", f"times {NO_LAG}", "least share of the shorter phase")
    return table(("", *columns), rows)


def staleness_show(results: Results) -> str:
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
    rates = [rate for rate in STALENESS_TASKS if any(result.task == f"learning rate {rate}" for result in results)]
    parts = [paragraph(text)]
    for rate in rates:
        task = f"learning rate {rate}"
        if STALENESS_TASKS[rate] is BY_LAG:
            plot = curves("staleness", results, task, STALENESS_TITLE)
            parts += [comparison(results, task, NO_LAG), accuracy_note(results), paragraph(waits), break_even(results)]
            parts += [plot, paragraph(bounds)]
        else:
            parts += [f"### {STALENESS_TITLE}: {task}", comparison(results, task, STALE)]
    return "\n\n".join(parts)


def staleness_summary(results: Results) -> list[str]:
    """Return the sentences of the summary: the accuracy at the own rate, the mean reward at high ones, the updates."""
    link = f"[{STALENESS_TITLE}](#{anchor(STALENESS_TITLE)})"
    sentences = []
    for rate, variants in STALENESS_TASKS.items():
        base, measure = (NO_LAG, ACCURACY) if variants is BY_LAG else (STALE, REWARD)
        # Beside a lag, a run without one has a higher mean reward by its first steps alone.
        compared = [result for result in results if base == NO_LAG or result.variant != NO_LAG]
        order = ranking(compared, f"learning rate {rate}", base, measure)
        if order:
            sentences.append(f"{link}, learning rate {rate}, {measure.name} beside {base}: {order}")
    needed = updates_needed(results)
    if STALE in needed:
        multiples = {
            name: spread([own / base for own, base in zip(needed[name], needed[NO_LAG], strict=True)])
            for name in (STALE, "lag 1")
        }
        sentences.append(
            f"{link}, learning rate {OWN_RATE}, updates until a reward of {LEVEL:g}, as multiples of those of {NO_LAG} "
            f"by seed: {', '.join(f'{name} {multiple}' for name, multiple in multiples.items())}."
        )
    return sentences


STALENESS_PART = Part("staleness", STALENESS_TITLE, STALENESS_RUNS, staleness_show, staleness_summary)


REPLAY_TITLE = "Replay"
REPLAY_BASE = "no replay"
REPLAYED, BOUNDS = ("4", "8"), ("0.1", "1")


@dataclass(frozen=True)
class Task:
    """A task with and without replay."""

    settings: Settings
    seeds: range
    steps: dict[str, str] = field(default_factory=dict)
    """For each number of replayed groups, the steps that take the processor time of the base's."""

    def variants(self) -> dict[str, Settings]:
        """Return the settings of each variant in addition to the task's."""
        replayed: dict[str, Settings] = {
            f"{groups} groups, KL to {bound}": {"REPLAY_GROUPS": groups, "REPLAY_MAX_KL": bound}
            for groups in REPLAYED
            for bound in BOUNDS
        }
        shorter: dict[str, Settings] = {
            f"{groups} groups, KL to {BOUNDS[-1]}, {steps} steps": {
                "REPLAY_GROUPS": groups,
                "REPLAY_MAX_KL": BOUNDS[-1],
                "MAX_STEPS": steps,
            }
            for groups, steps in self.steps.items()
        }
        return {REPLAY_BASE: {}, **replayed, **shorter}


SHORTER = {"4": "31", "8": "26"}
"""Steps of the tiny task that take the time of its 40 without replay."""
REPLAY_TASKS = {
    "tiny": Task(TINY, range(5), SHORTER),
    "tiny, learning rate 2e-3": Task(TINY | {"LEARNING_RATE": "2e-3"}, range(5), SHORTER),
    "demo": Task(DEMO_TASK, range(3)),
}
REPLAY_RUNS = [
    Run(name, variant, seed, seeded(task.settings | settings, seed), in_process.train)
    for name, task in REPLAY_TASKS.items()
    for seed in task.seeds
    for variant, settings in task.variants().items()
]


def costs(results: Results, task: str) -> str:
    """Return a table of the steps' processor time and the groups that were replayed, by variant."""
    processor = commonest_processor(results)
    rows = []
    for variant, own in by_variant(results, task).items():
        seconds = [run.figures[STEP_SECONDS] for run in own if run.processor == processor]
        counts = [spread([run.figures[name] for run in own], 0) for name in ("replayed", "left_out")]
        rows.append((variant, len(own[0].rewards), spread(seconds, 1), *counts))
    return table(("", "steps", "CPU seconds of the steps", "groups replayed", "left out by their KL"), rows)


def replay_show(results: Results) -> str:
    """Return the section: each task's comparisons and costs."""
    text = """
    Each step trains on 8 fresh groups, and on 4 or 8 groups of earlier steps beside them, drawn by priority from the
    last 8 policy versions. `KL to` is `REPLAY_MAX_KL`: a replayed group whose policy is further from the present one
    is left out. Rows with as many steps as the base generate as many tokens. Rows with fewer steps, on the tiny task,
    take somewhat more processor time than the base's steps, because the forward and backward passes of replayed groups
    take time. A mean reward over the steps is then one over about that time. Where generation takes a larger part of a
    step than here, replay costs less. The tiny task has two learning rates, its own and that of the highest accuracy
    in its [grid](#hyperparameters-of-the-tiny-task), because more groups also make a step larger.
    """
    parts = [paragraph(text)]
    for number, task in enumerate(task for task in REPLAY_TASKS if any(result.task == task for result in results)):
        own = [result for result in results if result.task == task]
        parts += [
            f"### {REPLAY_TITLE}: {task}",
            comparison(results, task, REPLAY_BASE),
            accuracy_note(own),
            costs(results, task),
        ]
        parts.append(curves(f"replay-{number}", results, task, f"{REPLAY_TITLE}: {task}"))
    return "\n\n".join(parts)


def replay_summary(results: Results) -> list[str]:
    """Return a sentence for each task."""
    return [
        f"[{REPLAY_TITLE}](#{anchor(REPLAY_TITLE)}) on the task {task}, mean reward beside {REPLAY_BASE}: {order}"
        for task in REPLAY_TASKS
        if (order := ranking(results, task, REPLAY_BASE))
    ]


REPLAY_PART = Part("replay", REPLAY_TITLE, REPLAY_RUNS, replay_show, replay_summary)
