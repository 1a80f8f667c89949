"""The metrics of an evaluation: pure functions on the judged samples of each prompt."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from evaluation.store import Kind, Sample
from services.core.numbers import quantity
from services.protocol.rewards import Metrics, estimate
from services.protocol.rewards import accuracy as results_accuracy


def majority_at_k(answers: Sequence[Sample], k: int) -> float:
    """Return how often the commonest answer among k samples is right (self-consistency, arXiv:2203.11171).

    Samples are taken in blocks of k and the blocks averaged, which makes the estimate unbiased. Completions without an
    answer have no vote; between equally common answers the choice is drawn, so each counts with its probability.

    Raises:
        ValueError: there are fewer than k answers, or k is not positive.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} cannot be estimated from {len(answers)} samples; needed is 1 <= k <= n")
    blocks = [answers[start : start + k] for start in range(0, len(answers) - k + 1, k)]
    return statistics.fmean(_majority(block) for block in blocks)


def _majority(answers: Sequence[Sample]) -> float:
    votes: Counter[str | Fraction] = Counter()
    right: Counter[str | Fraction] = Counter()
    for sample in answers:
        if sample.answer is not None:
            ballot = normalised(sample.answer)
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
    """Return the metrics of ``services.protocol.rewards.accuracy`` for the samples of each prompt, and ``maj@k``."""
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
    values = np.asarray(tokens)
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p95": float(np.quantile(values, 0.95)),
        "max": int(values.max()),
    }
