"""Methods of policy optimisation on a task, each at a learning rate of its own.

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
from benchmarks.results.comparisons import (
    ACCURACY,
    REWARD,
    accuracy_note,
    anchor,
    compare,
    comparison,
    names,
    paragraph,
    ranking,
    table,
)
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, Run, Settings, by_variant
from benchmarks.results.tasks import DEMO_TASK, TINY, seeded

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
        rates = [(method, rate) for method in self.variants for rate in self.rates.tried]
        return [self._run(self.choice, f"{method} at {rate}", seed, method, rate) for method, rate in rates]

    def compared(self, seed: int) -> list[Run]:
        """Return the runs of a seed that are compared."""
        return [self._run(self.task, method, seed, method, self.rate(method)) for method in self.variants]

    def _run(self, task: str, variant: str, seed: int, method: str, rate: str) -> Run:
        settings = self.settings | self.variants[method] | {"LEARNING_RATE": rate}
        return Run(task, variant, seed, seeded(settings, seed), in_process.train)

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


@dataclass(frozen=True)
class Comparison:
    """The comparison of all methods on a task, seed by seed."""

    name: str
    """The part's name."""
    title: str
    text: str
    """Facts about the task without which the table cannot be understood."""
    once: Methods
    """The methods with one update a batch."""
    often: Methods
    """The methods with four."""
    critic_rate: str
    """Learning rate of PPO's critic."""

    def part(self, seeds: Iterable[int]) -> Part:
        """Return the part with the runs of some seeds."""
        tables = (self.once, self.often)
        untrained = self.once.settings | {"EVAL_SAMPLES": "8"}
        runs = [run for seed in CHOOSING for methods in tables for run in methods.choosing(seed)]
        for seed in seeds:
            runs += [Run(self.once.task, way, seed, seeded(untrained, seed), use) for way, use in UNTRAINED.items()]
            runs += [run for methods in tables for run in methods.compared(seed)]
        return Part(self.name, self.title, runs, self.show, self.summary)

    def show(self, results: Results) -> str:
        """Return the section: both tables with their choices of rates, and the curves."""
        general = f"""
        `GRPO` has the product's defaults: advantages divided by the group's deviation, the mean over the tokens of the
        step, one update a batch. Every other row changes what it names; GSPO and CISPO have the clips and means of
        their papers. PPO has a critic of its own with a learning rate of {self.critic_rate}. `SFT on right answers` is
        rejection sampling: cross entropy on the right ones of the step's own samples, whose advantage is 1, while that
        of all others is 0. `SFT on the group's best` takes those with the highest reward of each group instead. `no
        training` and `best of 8, no training` are the policy before the first step on the held-out prompts; a verifier
        chooses the best of 8 answers, which counts as right if any is, and its reward is the highest of the eight.
        """
        once = self.once
        trained = [result for result in results if result.variant not in UNTRAINED]
        parts = [paragraph(self.text + general), *_choice(once, results), comparison(results, once.task, BASE)]
        parts.append(accuracy_note([result for result in trained if result.task == once.task]))
        parts.append(paragraph(_by_tokens(trained, once)))
        parts.append(curves(self.name, trained, once.task, "Methods, one update a batch"))
        if any(result.task == self.often.task for result in results):
            parts += self._several_updates(results)
        return "\n\n".join(part for part in parts if part)

    def _several_updates(self, results: Results) -> list[str]:
        """Return the subsection of four updates a batch."""
        often = self.often
        text = """
        With one update a batch, the ratio to the policy at the start of the step is 1, and clipping is never
        reached. Here each batch gives four updates, of two groups each.
        """
        if not often.rates.tried:
            text += f"All methods have the task's own learning rate of {often.settings['LEARNING_RATE']}."
        parts = [f"### {self.title}: four updates a batch", paragraph(text), *_choice(often, results)]
        parts.append(comparison(results, often.task, BASE))
        return [*parts, curves(f"{self.name}-four", results, often.task, "Methods, four updates a batch")]

    def summary(self, results: Results) -> list[str]:
        """Return the sentences of the summary."""
        sentences = []
        for methods, updates in ((self.once, "one update a batch"), (self.often, "four updates a batch")):
            order = ranking(results, methods.task, BASE)
            if order:
                link = f"[{self.title}](#{anchor(self.title)})"
                sentences.append(f"{link} beside GRPO, {updates}{_rates(methods)}: {order}")
        by_tokens = [sentence for sentence in (_by_tokens(results, self.once),) if sentence]
        return [*sentences, *by_tokens, *_more_updates(results, self.once, self.often)]


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


TINY_CRITIC_RATE = "1e-3"
TINY_RATES = Rates(
    ("1e-3", "2e-3", "4e-3"),
    {
        "GRPO": "4e-3",
        "Dr. GRPO": "2e-3",
        "RLOO": "4e-3",
        "REINFORCE++": "2e-3",
        "PPO": "2e-3",
        "sequence mean": "2e-3",
        "dynamic sampling": "2e-3",
        "SFT on right answers": "1e-3",
        "SFT on the group's best": "4e-3",
    },
)
TINY_TEXT = """
The tiny task of the parts above. Rewards in eighths leave few groups without variance until the task is learned, so
that dynamic sampling has little to replace. None of the first answers is right, so that there are none to fine-tune on.
GSPO's clip is made for the mean ratio of long completions.
"""
TINY_COMPARISON = Comparison(
    "methods",
    "Methods on the tiny task",
    TINY_TEXT,
    once=Methods("tiny", TINY, one_update(TINY_CRITIC_RATE), TINY_RATES),
    often=Methods("tiny, four updates a batch", TINY, four_updates(TINY_CRITIC_RATE), Rates()),
    critic_rate=TINY_CRITIC_RATE,
)
TINY_PART = TINY_COMPARISON.part(range(5))

DEMO_CRITIC_RATE = "1e-5"
SAME_AS_RIGHT = "SFT on the group's best"
"""Rewards are 0 or 1, so that the best of a group are its right answers, but for groups that are all right."""
DEMO_TEXT = """
SmolLM2-135M, pretrained, with the settings of `examples/demo.env`, 10 steps: one-digit additions, a reward of 1 for the
number alone and of 0 for everything else. All methods have the task's own learning rate of 2e-5, the best by mean
reward of the [grid](#hyperparameters-of-the-demo) for most settings. Once most groups are all right or all wrong, they
have no variance. Dynamic sampling replaces them, at the cost of their tokens. The overlong penalty grows over the last
four of the eight tokens; the table's rewards exclude it.
"""
DEMO_METHODS = {name: settings for name, settings in one_update(DEMO_CRITIC_RATE).items() if name != SAME_AS_RIGHT}
DEMO_COMPARISON = Comparison(
    "methods_demo",
    "Methods on the demo's task",
    DEMO_TEXT,
    once=Methods("demo", DEMO_TASK, DEMO_METHODS | {"overlong penalty": {"OVERLONG_BUFFER": "4"}}, Rates()),
    often=Methods("demo, four updates a batch", DEMO_TASK, four_updates(DEMO_CRITIC_RATE), Rates()),
    critic_rate=DEMO_CRITIC_RATE,
)
DEMO_PART = DEMO_COMPARISON.part(range(3))
