"""Methods of policy optimisation, each at a learning rate of its own on the tiny task.

A method is tried at each rate of ``TRIED`` on seeds that serve this choice alone. ``best`` says which rate has the
highest mean reward, and the comparison on other seeds is made at it, by ``RATES``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.results import in_process
from benchmarks.results.comparisons import REWARD, compare, table
from benchmarks.results.runs import Result, Results, Run, Settings, by_variant, runs_of
from benchmarks.results.tasks import TINY

BASE = "GRPO"
DYNAMIC = "dynamic sampling"
UPDATES: Settings = {"UPDATES_PER_BATCH": "4"}
CHOICE = "tiny, choice of rates"
"""The task of the runs that choose the learning rates."""
CHOOSING = range(100, 102)
"""Seeds of this choice."""
TRIED = ("1e-3", "2e-3", "4e-3")
RATES = {
    "GRPO": "4e-3",
    "Dr. GRPO": "2e-3",
    "RLOO": "4e-3",
    "REINFORCE++": "2e-3",
    "PPO": "2e-3",
    "sequence mean": "2e-3",
    "dynamic sampling": "2e-3",
    "SFT on right answers": "1e-3",
    "SFT on the group's best": "4e-3",
}
"""The best rate of each method by its mean reward on the seeds of CHOOSING."""


def one_update(critic_rate: str) -> dict[str, Settings]:
    """Return the methods that differ with a single update a batch; GRPO has the product's defaults."""
    return {
        BASE: {},
        "Dr. GRPO": {"ADVANTAGE": "dr_grpo", "AGGREGATION": "constant_length"},
        "RLOO": {"ADVANTAGE": "rloo"},
        "REINFORCE++": {"ADVANTAGE": "reinforce"},
        "PPO": {"ADVANTAGE": "gae", "CRITIC_LEARNING_RATE": critic_rate},
        "sequence mean": {"AGGREGATION": "sequence_mean"},
        DYNAMIC: {"DYNAMIC_SAMPLING_TRIES": "2"},
        "SFT on right answers": {"ADVANTAGE": "benchmarks.results.baselines:right_answers"},
        "SFT on the group's best": {"ADVANTAGE": "benchmarks.results.baselines:best_of_group"},
    }


def four_updates(critic_rate: str) -> dict[str, Settings]:
    """Return the methods that differ in the ratio to the policy at the start of the step, 1 in the first update."""
    return {
        BASE: UPDATES,
        "clip-higher": UPDATES | {"CLIP_HIGH": "0.28"},
        "GSPO": UPDATES | {"LOSS": "gspo"},
        "CISPO": UPDATES | {"LOSS": "cispo"},
        "PPO": UPDATES | one_update(critic_rate)["PPO"],
    }


METHODS = one_update(critic_rate="1e-3")


def choosing() -> list[Run]:
    """Return the runs that choose the learning rates."""
    variants = {
        f"{method} at {rate}": (settings | {"LEARNING_RATE": rate}, in_process.train)
        for method, settings in METHODS.items()
        for rate in TRIED
    }
    return runs_of(CHOICE, TINY, CHOOSING, variants)


def means_by_rate(results: Results) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each method that has all runs of the choice, with its mean reward at each learning rate."""
    tried = by_variant(results, CHOICE)
    for method in METHODS:
        by_rate = {rate: tried.get(f"{method} at {rate}", []) for rate in TRIED}
        if all(len(runs) == len(CHOOSING) for runs in by_rate.values()):
            yield method, {rate: statistics.fmean(run.area for run in runs) for rate, runs in by_rate.items()}


def best(results: Results) -> dict[str, str]:
    """Return the rate with the highest mean reward of each method that has all runs of the choice."""
    return {method: max(means, key=means.__getitem__) for method, means in means_by_rate(results)}


def choice(results: Results) -> str:
    """Return a table of the mean rewards by learning rate."""
    chosen = best(results)
    rows = [
        (
            method,
            *(f"**{mean:.3f}**" if rate == chosen[method] else f"{mean:.3f}" for rate, mean in means.items()),
            RATES[method],
        )
        for method, means in means_by_rate(results)
    ]
    return table(("mean reward at", *TRIED, "compared at"), rows)


def by_tokens(results: Results, task: str) -> str:
    """Return how dynamic sampling compares with GRPO by generated tokens: the mean reward of equally many of them."""
    runs, base = (by_variant(results, task).get(name, []) for name in (DYNAMIC, BASE))
    budget = min((sum(result.tokens) for result in (*runs, *base)), default=0)
    compared = compare(runs, base, replace(REWARD, of=lambda result: reward_of_tokens(result, budget)))
    if compared is None:
        return ""
    return (
        f"Dynamic sampling samples further groups in a step. By generated tokens, over the first {budget:,} of each "
        f"run on the task {task}, its mean reward is **{compared.verdict}**: the difference from GRPO is {compared}."
    )


def reward_of_tokens(result: Result, budget: int) -> float:
    """Return the mean reward over a run's first ``budget`` generated tokens."""
    left, total = budget, 0.0
    for reward, tokens in zip(result.rewards, result.tokens, strict=True):
        total += reward * min(tokens, left)
        left -= min(tokens, left)
    return total / (budget - left)
