"""The output of an evaluation: progress, metrics, tables and results.json."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from evaluation.evaluation import Progress
from evaluation.plan import Checkpoint
from evaluation.settings import EvaluationSettings
from evaluation.store import Key, Kind, Sample
from services.core.numbers import quantity
from services.protocol.accuracy import UNDECIDED, Metrics, estimate, macro_mean
from services.protocol.accuracy import accuracy as results_accuracy
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason

RESULTS = "results.json"
WORKFLOWS = {False: "single-turn", True: "agent"}
"""The names in results.json of the ways to answer a prompt, by whether there is an agent."""
LINE_SECONDS = 10.0
"""The time between two lines of progress."""


class View:
    """The progress of one model's evaluation: lines at the start, at the end and every LINE_SECONDS."""

    def __init__(self, console: Console, name: str) -> None:
        self._console = console
        self._name = name
        self._printed = float("-inf")

    def show(self, progress: Progress) -> None:
        """Print a line if one is due."""
        is_last = progress.done + progress.left_out.total() >= progress.total
        if not is_last and time.monotonic() - self._printed < LINE_SECONDS:
            return
        parts = [f"{self._name}  {progress.done}/{progress.total} samples"]
        if progress.greedy:
            parts.append(f"right {progress.correct / progress.greedy:.3f}")
        if rate := progress.throughput["completion_tokens_per_second"]:
            parts.append(f"{rate:.0f} tokens/s")
        if progress.left_out:
            parts.append(f"{progress.left_out.total()} left out")
        self._printed = time.monotonic()
        self._console.print("  ".join(parts))


class Results(BaseModel):
    """The numbers of one model, as results.json has them."""

    model: str
    name: str
    step: int | None
    fingerprint: str
    dataset: str
    split: str
    workflow: str
    prompts: int
    available: int = 0
    """Prompts of the split; EVAL_PROMPTS may take fewer, the first ones, and some may be too long."""
    samples_per_prompt: int
    metrics: Metrics
    """With several sources macro means, in which each source counts the same."""
    sources: dict[str, Metrics] = {}
    """By the source in SOURCES."""
    categories: dict[str, Metrics] = {}
    reward_mean: dict[str, float] = {}
    """Mean reward, by kind."""
    completion_tokens: dict[str, dict[str, int | float]] = {}
    """Mean, median, p95 and max of the lengths, by kind."""
    truncated: dict[str, float] = {}
    """Share of completions that ended at their length limit, by kind."""
    agent: dict[str, float] = {}
    """Turns and tool calls an episode."""
    left_out: dict[str, int] = {}
    """Samples that are in no metric, by reason: a service failed, or an agent did."""
    over_limit: int = 0
    """Samples counted as wrong because they went over the verifier's time or memory limit, or an agent's limits."""
    throughput: dict[str, int | float | None] = {}
    server: str = ""
    """The URL of the router or engine."""
    not_given: list[str] = []
    """Facts that the server does not give."""
    policy_versions: list[int] = []
    settings: dict[str, Any] = {}

    @property
    def title(self) -> str:
        """The heading of tables: the split, and how many of its prompts were evaluated."""
        of_all = f" of {self.available}" if self.prompts < self.available else ""
        return f"{self.dataset} {self.split}, {self.prompts}{of_all} prompts"

    @property
    def headline(self) -> list[str]:
        """One metric of each kind: of pass@k and maj@k the metric with the largest k."""
        names = [name for metrics in (self.metrics, *self.sources.values()) for name in metrics]
        return list({name.partition("@")[0]: name for name in names}.values())

    @property
    def rows(self) -> dict[str, str]:
        """The cells of the printed table by the label of their row."""
        cells = {name: str(estimate) for name, estimate in self.metrics.items()}
        if tokens := self.completion_tokens.get("greedy"):
            cells["tokens, mean"] = f"{tokens['mean']:.0f}"
            cells["tokens, p95"] = f"{tokens['p95']:.0f}"
            cells["truncated"] = f"{self.truncated['greedy']:.1%}"
        if rate := self.throughput.get("completion_tokens_per_second"):
            cells["tokens/s"] = f"{rate:.0f}"
        return cells | {name.replace("_", " "): f"{value:.2f}" for name, value in self.agent.items()}


def results_of(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    samples: Mapping[Key, Sample],
    settings: EvaluationSettings,
    *,
    left_out: Mapping[str, int],
    identity: dict[str, Any],
    **facts: Any,
) -> Results:
    """Return the numbers of the samples in a store.

    Args:
        checkpoint: the model.
        prompts: the prompts that count; a store may have samples of more.
        samples: the store's samples.
        settings: say which metrics; a store may have more samples of a prompt than they ask for.
        left_out: samples that could not be obtained, by reason.
        identity: everything that the samples depend on.
        **facts: the other fields of ``Results``.
    """
    n, ks = settings.eval_samples, settings.ks
    drawn = [_drawn(prompt, samples, n) for prompt in prompts]
    everything = [sample for of_prompt in drawn for sample in of_prompt]
    by_kind = {kind.value: chosen for kind in Kind if (chosen := [s for s in everything if s.kind is kind])}
    sources = _by([prompt.source or None for prompt in prompts], drawn, settings)
    return Results(
        model=checkpoint.model,
        name=checkpoint.name,
        step=checkpoint.step,
        fingerprint=checkpoint.fingerprint(),
        prompts=len(prompts),
        split=settings.eval_split,
        workflow=", ".join(sorted({WORKFLOWS[own.has_agent] for own in settings.by_source().values()})),
        samples_per_prompt=n,
        settings=identity,
        metrics=macro_mean(list(sources.values())) if sources else accuracy(drawn, n, ks),
        sources=sources,
        categories=_by([prompt.category for prompt in prompts], drawn, settings),
        left_out=dict(left_out),
        over_limit=sum(sample.is_over_limit for sample in everything),
        policy_versions=sorted({s.policy_version for s in everything if s.policy_version is not None}),
        **_statistics(by_kind),
        **facts,
    )


def _drawn(prompt: Prompt, samples: Mapping[Key, Sample], n: int) -> list[Sample]:
    """Return the greedy sample of a prompt and its first ``n`` others, as far as the store has them."""
    keys = [(prompt.id, Kind.GREEDY, 0), *((prompt.id, Kind.SAMPLED, index) for index in range(n))]
    return [samples[key] for key in keys if key in samples]


def _by(
    groups: Sequence[str | None], drawn: Sequence[Sequence[Sample]], settings: EvaluationSettings
) -> dict[str, Metrics]:
    """Return ``accuracy`` of each group of prompts, in order; prompts of the group None are left out."""
    members: dict[Any, list[Sequence[Sample]]] = {}
    for group, samples in zip(groups, drawn, strict=False):
        if group is not None:
            members.setdefault(group, []).append(samples)
    return {str(name): accuracy(members[name], settings.eval_samples, settings.ks) for name in sorted(members)}


def _statistics(by_kind: Mapping[str, Sequence[Sample]]) -> dict[str, dict[str, Any]]:
    """Return rewards, lengths and truncation by kind, and the turns and tool calls of agents."""
    figures: dict[str, dict[str, Any]] = {"reward_mean": {}, "completion_tokens": {}, "truncated": {}, "agent": {}}
    for kind, samples in by_kind.items():
        rewards = [s.result.reward for s in samples if s.result.reward is not None]
        if rewards:
            figures["reward_mean"][kind] = statistics.fmean(rewards)
        # A server that counts no tokens gives 0; a completion has one at least, its end.
        figures["completion_tokens"][kind] = lengths([s.completion_tokens for s in samples if s.completion_tokens])
        figures["truncated"][kind] = statistics.fmean(s.finish_reason is FinishReason.LENGTH for s in samples)
    if episodes := [s for samples in by_kind.values() for s in samples if s.messages is not None]:
        figures["agent"]["turns"] = statistics.fmean(s.turns for s in episodes)
        figures["agent"]["tool_calls"] = statistics.fmean(s.tool_calls for s in episodes)
    return figures


def majority_at_k(answers: Sequence[Sample], k: int) -> float:
    """Return how often the commonest answer among k samples is right (self-consistency, arXiv:2203.11171).

    Samples are taken in blocks of k and the blocks averaged, which makes the estimate unbiased. Completions without an
    answer have no vote; between equally common answers the choice is drawn, so each counts with its probability.
    """
    blocks = [answers[start : start + k] for start in range(0, len(answers) - k + 1, k)]
    return statistics.fmean(_majority(block) for block in blocks)


def _majority(answers: Sequence[Sample]) -> float:
    votes: Counter[str | Fraction] = Counter()
    right: Counter[str | Fraction] = Counter()
    for sample in answers:
        if sample.result.extracted is not None:
            ballot = normalised(sample.result.extracted)
            votes[ballot] += 1
            right[ballot] += bool(sample.is_correct)
    if not votes:
        return 0.0
    most = max(votes.values())
    # Equal answers are judged alike, except by rewards that also look at the rest of the text.
    return statistics.fmean(2 * right[ballot] > count for ballot, count in votes.items() if count == most)


def normalised(text: str) -> str | Fraction:
    """Return a form in which two spellings of an answer are equal: its number, else its text without white space."""
    number = quantity(text)
    return "".join(text.split()).casefold() if number is None else number.value


def accuracy(prompts: Sequence[Sequence[Sample]], n: int, ks: Sequence[int]) -> Metrics:
    """Return the metrics of ``services.protocol.accuracy.accuracy`` for the samples of each prompt, and ``maj@k``."""
    results = {kind: [[s.result for s in samples if s.kind is kind] for samples in prompts] for kind in Kind}
    metrics = results_accuracy(results[Kind.GREEDY], results[Kind.SAMPLED], n, ks)
    judged = [[s for s in samples if s.kind is Kind.SAMPLED and s.is_correct is not None] for samples in prompts]
    for k in ks if metrics else ():
        if scores := [majority_at_k(samples, k) for samples in judged if len(samples) >= k]:
            metrics[f"maj@{k}"] = estimate(scores)
    return metrics


def lengths(tokens: Sequence[int]) -> dict[str, float]:
    """Return mean, median, 95th percentile and maximum of completion lengths in tokens; empty without lengths."""
    if not tokens:
        return {}
    median, p95 = np.quantile(tokens, (0.5, 0.95)).tolist()
    return {"mean": statistics.fmean(tokens), "median": median, "p95": p95, "max": max(tokens)}


def show(console: Console, results: Results) -> None:
    """Print the table of a model, and its tables by source and by category."""
    table = Table("", results.name, title=results.title, title_justify="left")
    for row in results.rows.items():
        table.add_row(*row)
    console.print(table, soft_wrap=False)
    for kind, parts in (("source", results.sources), ("category", results.categories)):
        if parts:
            console.print(_table_by(kind, parts, results), soft_wrap=False)
    if results.left_out:
        counts = ", ".join(f"{results.left_out[reason]} {reason}" for reason in sorted(results.left_out))
        console.print(f"left out: {counts}", style="yellow")
    if not results.metrics:
        console.print(f"no accuracy: {UNDECIDED}", style="yellow")
    if results.not_given:
        console.print(f"the server does not give: {', '.join(results.not_given)}", style="yellow")
    if results.over_limit:
        console.print(f"counted as wrong, over a limit (see samples.jsonl): {results.over_limit}", style="yellow")


def _table_by(kind: str, parts: Mapping[str, Metrics], results: Results) -> Table:
    names = results.headline
    table = Table(kind, "prompts", *names, title=f"{results.name} by {kind}", title_justify="left")
    for part, metrics in parts.items():
        prompts = max((estimate.prompts for estimate in metrics.values()), default=0)
        table.add_row(part, str(prompts), *(str(metrics.get(name, "-")) for name in names))
    return table
