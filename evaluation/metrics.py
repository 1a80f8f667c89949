"""The metrics of an evaluation: pure functions on the judged samples of each prompt, and intervals.

A score is one number a prompt. A metric is the mean of the scores; its interval says how far that mean moves when other
prompts of the same kind are drawn.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from evaluation.samples import Kind, Sample
from services.core.numbers import quantity
from services.protocol.rewards import Estimate, Z, estimate, pass_at_k, standard_error

CONFIDENCE = 0.95
RESAMPLES = 2000
"""Resamples of the bootstrap: the interval's ends are then stable to a few per cent of its width."""
GREEDY = "greedy pass@1"


Metrics = dict[str, Estimate]


def bootstrap(scores: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Return the mean of ``scores`` [prompts] with its percentile bootstrap interval (Efron 1979) over prompts.

    Raises:
        ValueError: there are no scores.
    """
    if not scores:
        raise ValueError("a mean needs at least one score")
    values = np.asarray(scores, dtype=np.float64)
    n = len(values)
    draw = np.random.default_rng(seed)
    means = [values[draw.integers(0, n, n)].mean() for _ in range(resamples)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail]).tolist()
    return Estimate(value=values.mean().item(), stderr=standard_error(scores), low=low, high=high, prompts=n)


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
    """Return greedy pass@1 (``GREEDY``), then ``avg@n``, and ``pass@k`` and ``maj@k`` for each k.

    Each metric is over the prompts that have enough judged samples for it; a metric without such a prompt is left out,
    and so are all of them if no part of REWARD_FN says whether an answer is right.

    Args:
        prompts: the samples of each prompt.
        n: samples of each prompt in addition to the greedy one.
        ks: each at most ``n``.
    """
    if any(s.result and s.result.decided_by == "" for samples in prompts for s in samples):
        return {}
    greedy = [s for samples in prompts for s in samples if s.kind is Kind.GREEDY and s.is_correct is not None]
    judged = [[s for s in samples if s.kind is Kind.SAMPLED and s.is_correct is not None] for samples in prompts]
    sampled = [(drawn, sum(s.is_correct is True for s in drawn)) for drawn in judged if drawn]
    scores = {GREEDY: [float(s.is_correct is True) for s in greedy]}
    if n:
        scores[f"avg@{n}"] = [right / len(drawn) for drawn, right in sampled]
    for k in ks:
        enough = [(drawn, right) for drawn, right in sampled if len(drawn) >= k]
        scores[f"pass@{k}"] = [pass_at_k(len(drawn), right, k) for drawn, right in enough]
        scores[f"maj@{k}"] = [majority_at_k(drawn, k) for drawn, _ in enough]
    return {name: estimate(values) for name, values in scores.items() if values}


def macro_mean(sources: Sequence[Metrics]) -> Metrics:
    """Return the mean of each metric over sources, in which each counts the same, whatever its number of prompts.

    The estimates are independent, so that the variance of their mean is the sum of their variances / n^2. The interval
    is the normal one within 0 and 1, because Wilson's is of one proportion. A metric that a source lacks is left out.
    """
    means: Metrics = {}
    for name in sources[0]:
        parts = [metrics[name] for metrics in sources if name in metrics]
        if len(parts) == len(sources):
            value = statistics.fmean(part.value for part in parts)
            error = math.hypot(*(part.stderr for part in parts)) / len(parts)
            low, high = max(value - Z * error, 0.0), min(value + Z * error, 1.0)
            means[name] = Estimate(value=value, stderr=error, low=low, high=high, prompts=sum(p.prompts for p in parts))
    return means


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
