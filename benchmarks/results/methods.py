"""Parts that compare methods of policy optimisation on a task, each at a learning rate of its own.

A method is tried at each of a table's learning rates, on seeds that serve this choice alone. ``Rates.chosen`` says
which rate has the highest mean reward, and the comparison on the other seeds is made at it. A table that tries no rates
has the task's own for all methods.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.results import in_process
from benchmarks.results.equivalence import ACCURACY, REWARD, compare
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, Run, Settings, by_variant
from benchmarks.results.tables import accuracy_note, anchor, comparison, names, paragraph, ranking, table
from benchmarks.results.tasks import seeded

BASE = "GRPO"
DYNAMIC = "dynamic sampling"
UPDATES: Settings = {"UPDATES_PER_BATCH": "4"}
CHOOSING = range(100, 102)
"""Seeds of the choice of learning rates."""
UNTRAINED = {
    "no training": partial(in_process.evaluate),
    "best of 8, no training": partial(in_process.evaluate, best=True),
}
"""Ways to use the policy as it is; both sample 8 answers to each held-out prompt."""


@dataclass(frozen=True)
class Rates:
    """The learning rates that the methods of a table are tried at."""

    tried: Sequence[str] = ()
    chosen: Mapping[str, str] = field(default_factory=dict)
    """The best rate of each method by its mean reward on the seeds of CHOOSING; without one, the task's own."""


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


@dataclass(frozen=True)
class Methods:
    """A table of methods on a task."""

    task: str
    settings: Settings
    variants: Mapping[str, Settings]
    rates: Rates

    @property
    def choice(self) -> str:
        """The task of the runs that choose the learning rates."""
        return f"{self.task}, choice of rates"

    def choosing(self, seed: int) -> list[Run]:
        """Return the runs of a seed that choose the learning rates."""
        return [
            Run(
                self.choice,
                f"{method} at {rate}",
                seed,
                seeded(self.settings | own | {"LEARNING_RATE": rate}, seed),
                in_process.train,
            )
            for method, own in self.variants.items()
            for rate in self.rates.tried
        ]

    def compared(self, seed: int) -> list[Run]:
        """Return the runs of a seed that are compared."""
        return [
            Run(
                self.task,
                method,
                seed,
                seeded(self.settings | own | {"LEARNING_RATE": self.rate(method)}, seed),
                in_process.train,
            )
            for method, own in self.variants.items()
        ]

    def rate(self, method: str) -> str:
        """Return the learning rate at which a method is compared."""
        return self.rates.chosen.get(method, self.settings["LEARNING_RATE"])

    def best(self, results: Results) -> dict[str, str]:
        """Return the rate with the highest mean reward of each method that has all runs of the choice."""
        tried = by_variant(results, self.choice)
        found = {}
        for method in self.variants:
            means = {rate: _mean_reward(tried.get(f"{method} at {rate}", [])) for rate in self.rates.tried}
            if means and not any(math.isnan(mean) for mean in means.values()):
                found[method] = max(means, key=means.__getitem__)
        return found

    def choice_table(self, results: Results) -> str:
        """Return a table of the mean rewards by learning rate; "" without runs of the choice."""
        tried, best = by_variant(results, self.choice), self.best(results)
        if not tried:
            return ""
        rows = []
        for method in self.variants:
            means = [_mean_reward(tried.get(f"{method} at {rate}", [])) for rate in self.rates.tried]
            cells = ["" if math.isnan(mean) else f"{mean:.3f}" for mean in means]
            cells = [
                f"**{cell}**" if best.get(method) == rate else cell
                for rate, cell in zip(self.rates.tried, cells, strict=True)
            ]
            rows.append((method, *cells, self.rate(method)))
        return table(("mean reward at", *self.rates.tried, "compared at"), rows)


def _mean_reward(results: Results) -> float:
    """Return the mean reward over the seeds of the choice; NaN unless all of them have a run."""
    return statistics.fmean(run.area for run in results) if len(results) == len(CHOOSING) else math.nan


def methods_part(
    name: str, title: str, text: str, tables: Sequence[Methods], *, critic_rate: str, seeds: Iterable[int]
) -> Part:
    """Return the part that compares all methods on a task, seed by seed.

    Args:
        name: the part's name.
        title: its heading.
        text: what the reader must know of the task to understand the table.
        tables: the methods with one update a batch, and those with four.
        critic_rate: learning rate of PPO's critic.
        seeds: the seeds of the comparison.
    """
    once, often = tables
    untrained = once.settings | {"EVAL_SAMPLES": "8"}
    runs = [run for seed in CHOOSING for methods in tables for run in methods.choosing(seed)]
    for seed in seeds:
        runs += [Run(once.task, way, seed, seeded(untrained, seed), use) for way, use in UNTRAINED.items()]
        runs += [run for methods in tables for run in methods.compared(seed)]

    def show(results: Results) -> str:
        general = f"""
        `GRPO` has the product's defaults: advantages divided by the group's deviation, the mean over the tokens of the
        step, one update a batch. Every other row changes what it names; GSPO and CISPO have the clips and means of
        their papers. PPO has a critic of its own with a learning rate of {critic_rate}. `SFT on right answers` is
        rejection sampling: cross entropy on the right ones of the step's own samples, whose advantage is 1, while that
        of all others is 0. `SFT on the group's best` takes those with the highest reward of each group instead. `no
        training` and `best of 8, no training` are the policy before the first step on the held-out prompts; a verifier
        chooses the best of 8 answers, which counts as right if any is, and its reward is the highest of the eight.
        """
        trained = [result for result in results if result.variant not in UNTRAINED]
        parts = [paragraph(text + general), *_choice(once, results), comparison(results, once.task, BASE)]
        parts.append(accuracy_note([result for result in trained if result.task == once.task]))
        parts.append(paragraph(_by_tokens(trained, once)))
        parts.append(curves(name, trained, once.task, "Methods, one update a batch"))
        if any(result.task == often.task for result in results):
            several = """
            With one update a batch, the ratio to the policy at the start of the step is 1, and clipping is never
            reached. Here each batch gives four updates, of two groups each.
            """
            if not often.rates.tried:
                several += f"All methods have the task's own learning rate of {often.settings['LEARNING_RATE']}."
            parts += [f"### {title}: four updates a batch", paragraph(several), *_choice(often, results)]
            parts += [comparison(results, often.task, BASE)]
            parts.append(curves(f"{name}-four", results, often.task, "Methods, four updates a batch"))
        return "\n\n".join(part for part in parts if part)

    def summary(results: Results) -> list[str]:
        sentences = []
        for methods, updates in ((once, "one update a batch"), (often, "four updates a batch")):
            order = ranking(results, methods.task, BASE)
            if order:
                sentences.append(f"[{title}](#{anchor(title)}) beside GRPO, {updates}{_rates(methods)}: {order}")
        by_tokens = [sentence for sentence in (_by_tokens(results, once),) if sentence]
        return [*sentences, *by_tokens, *_more_updates(results, once, often)]

    return Part(name, title, runs, show, summary)


def _rates(methods: Methods) -> str:
    if methods.rates.chosen:
        return ", each at the best of three learning rates"
    return ", all at one learning rate, so that sizes of steps count, too"


def _choice(methods: Methods, results: Results) -> list[str]:
    """Return the paragraph and the table of the choice of learning rates."""
    shown = methods.choice_table(results)
    if not shown:
        return []
    seeds = names(map(str, CHOOSING))
    text = f"""
    Each method has the learning rate, of {len(methods.rates.tried)}, with the highest mean reward on the seeds {seeds},
    which the comparison leaves out. Where it is the largest of the three, a larger one might be better still:
    """
    return [paragraph(text), shown]


def _by_tokens(results: Results, methods: Methods) -> str:
    """Return how dynamic sampling compares with GRPO by generated tokens: the mean reward of as many of them."""
    own, base = (by_variant(results, methods.task).get(name, []) for name in (DYNAMIC, BASE))
    budget = min((sum(result.tokens) for result in (*own, *base)), default=0)
    compared = compare(own, base, replace(REWARD, of=lambda result: reward_of_tokens(result, budget)))
    if compared is None:
        return ""
    return (
        f"Dynamic sampling samples further groups in a step. By generated tokens, over the first {budget:,} of each "
        f"run on the task {methods.task}, its mean reward is **{compared.verdict}**: the difference from GRPO is "
        f"{compared}."
    )


def reward_of_tokens(result: Result, budget: int) -> float:
    """Return the mean reward over a run's first ``budget`` generated tokens."""
    left, total = budget, 0.0
    for reward, tokens in zip(result.rewards, result.tokens, strict=True):
        total += reward * min(tokens, left)
        left -= min(tokens, left)
    return total / (budget - left)


def _more_updates(results: Results, once: Methods, often: Methods) -> list[str]:
    """Return how much GRPO gains from more updates a batch, where both have the same seeds."""
    before, after = (by_variant(results, methods.task).get(BASE, []) for methods in (once, often))
    compared = compare(after, before, ACCURACY)
    if compared is None or often.rate(BASE) != once.rate(BASE):
        return []
    return [
        f"With four updates a batch instead of one, GRPO's accuracy on the task {once.task} is **{compared.verdict}**: "
        f"the difference is {compared}."
    ]
