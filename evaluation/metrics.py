"""The metrics of an evaluation: pure functions on the judged answers of each prompt, and intervals.

A score is one number a prompt. A metric is the mean of the scores; its interval says how far that mean moves when other
prompts of the same kind are drawn.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from pydantic import BaseModel

from services.core.numbers import quantity
from services.protocol.pass_at_k import interval, pass_at_k, standard_error

CONFIDENCE = 0.95
RESAMPLES = 2000
"""Resamples of the bootstrap: the interval's ends are then stable to a few per cent of its width."""
GREEDY = "greedy pass@1"


@dataclass(frozen=True)
class Answer:
    """A judged completion: whether it is right, and the answer read from it (None: no answer was found)."""

    is_correct: bool
    answer: str | None = None


@dataclass(frozen=True)
class PromptAnswers:
    """The judged answers of one prompt: the greedy one and the sampled ones."""

    greedy: Answer | None
    samples: Sequence[Answer] = ()
    category: str | None = None


class Estimate(BaseModel):
    """A mean over ``prompts`` prompts with its standard error and the ends of its interval."""

    value: float
    stderr: float
    low: float
    high: float
    prompts: int

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


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


def majority_at_k(answers: Sequence[Answer], k: int) -> float:
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


def _majority(answers: Sequence[Answer]) -> float:
    votes: Counter[str | Fraction] = Counter()
    right: Counter[str | Fraction] = Counter()
    for given in answers:
        if given.answer is not None:
            ballot = normalised(given.answer)
            votes[ballot] += 1
            right[ballot] += given.is_correct
    if not votes:
        return 0.0
    most = max(votes.values())
    # Equal answers are judged alike, except by rewards that also look at the rest of the text.
    return statistics.fmean(2 * right[ballot] > count for ballot, count in votes.items() if count == most)


def normalised(text: str) -> str | Fraction:
    """Return a form in which two spellings of an answer are equal: its number, else its text without white space."""
    number = quantity(text)
    return "".join(text.split()).casefold() if number is None else number.value


def accuracy(prompts: Sequence[PromptAnswers], samples: int, ks: Sequence[int]) -> Metrics:
    """Return greedy pass@1 (``GREEDY``), then ``avg@n``, and ``pass@k`` and ``maj@k`` for each k.

    Each metric is over the prompts that have enough answers for it; a metric without such a prompt is left out.

    Args:
        prompts: the answers of each prompt.
        samples: samples of each prompt (n).
        ks: each at most n.
    """
    scores: dict[str, list[float]] = {GREEDY: [float(p.greedy.is_correct) for p in prompts if p.greedy is not None]}
    sampled = [p.samples for p in prompts if p.samples]
    if samples:
        scores[f"avg@{samples}"] = [statistics.fmean(answer.is_correct for answer in answers) for answers in sampled]
    for k in ks:
        enough = [answers for answers in sampled if len(answers) >= k]
        scores[f"pass@{k}"] = [pass_at_k(len(a), sum(one.is_correct for one in a), k) for a in enough]
        scores[f"maj@{k}"] = [majority_at_k(a, k) for a in enough]
    return {name: _estimate(values) for name, values in scores.items() if values}


def _estimate(scores: Sequence[float]) -> Estimate:
    low, high = interval(scores)
    mean, error = statistics.fmean(scores), standard_error(scores)
    return Estimate(value=mean, stderr=error, low=low, high=high, prompts=len(scores))


def by_category(prompts: Sequence[PromptAnswers], samples: int, ks: Sequence[int]) -> dict[str, Metrics]:
    """Return ``accuracy`` of each category, in alphabetical order; empty where the dataset has no categories."""
    names = sorted({prompt.category for prompt in prompts if prompt.category is not None})
    return {name: accuracy([p for p in prompts if p.category == name], samples, ks) for name in names}


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
