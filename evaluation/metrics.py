"""The numbers of an evaluation: pure functions on what came of each prompt, and bootstrap intervals.

A score is one number a prompt; a metric is the mean of the scores, and its interval says how far that mean moves when
other prompts of the same kind are drawn.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from services.protocol.pass_at_k import pass_at_k, standard_error
from services.reward_server.numbers import quantity

CONFIDENCE = 0.95
GREEDY = "greedy pass@1"
_BLOCK = 4_000_000
"""Resampled scores held at once."""


@dataclass(frozen=True)
class Answer:
    """A judged completion: whether it is right, and the answer read from it (None: no answer was found)."""

    is_correct: bool
    answer: str | None = None


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its standard error and its interval; ``prompts`` says over how many."""

    value: float
    stderr: float
    low: float
    high: float
    prompts: int

    def as_dict(self) -> dict[str, Any]:
        """For results.json."""
        return asdict(self)


def bootstrap(scores: Sequence[float], resamples: int, seed: int = 0, confidence: float = CONFIDENCE) -> Estimate:
    """The mean of ``scores`` [prompts] with its percentile bootstrap interval (Efron 1979), prompts being resampled.

    Raises:
        ValueError: there are no scores.
    """
    if not scores:
        raise ValueError("a mean needs at least one score")
    values = np.asarray(scores, dtype=np.float64)
    n = len(values)
    draw = np.random.default_rng(seed)
    block = max(1, _BLOCK // n)
    means = [
        values[draw.integers(0, n, (min(block, resamples - start), n))].mean(axis=1)
        for start in range(0, resamples, block)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Estimate(float(values.mean()), standard_error(scores), float(low), float(high), n)


def avg_at_k(answers: Sequence[Answer]) -> float:
    """The share of right answers among a prompt's samples."""
    return statistics.fmean(answer.is_correct for answer in answers)


def majority_at_k(answers: Sequence[Answer], k: int) -> float:
    """How often the commonest answer among k samples is right (self-consistency, arXiv:2203.11171).

    Samples are taken in blocks of k, and the blocks averaged, which estimates it without bias. Completions without an
    answer have no vote; between equally common answers the choice is drawn, so each counts with its probability.
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
            ballot = same_answer(given.answer)
            votes[ballot] += 1
            right[ballot] += given.is_correct
    if not votes:
        return 0.0
    most = max(votes.values())
    # Answers that read alike are judged alike, but for rewards that also look at the rest of the text.
    return statistics.fmean(2 * right[ballot] > count for ballot, count in votes.items() if count == most)


def same_answer(text: str) -> str | Fraction:
    """What two spellings of one answer share: the number where it is one, else the text without white space."""
    number = quantity(text)
    return "".join(text.split()).casefold() if number is None else number.value


def sampled_scores(samples: Sequence[Sequence[Answer]], k: int) -> dict[str, list[float]]:
    """pass@k and maj@k of each prompt that has k samples or more."""
    enough = [answers for answers in samples if len(answers) >= k]
    return {
        f"pass@{k}": [pass_at_k(len(a), sum(one.is_correct for one in a), k) for a in enough],
        f"maj@{k}": [majority_at_k(a, k) for a in enough],
    }


@dataclass(frozen=True)
class PromptAnswers:
    """All that counts of one prompt: its greedy answer and its sampled ones, those that were judged."""

    greedy: Answer | None
    samples: Sequence[Answer] = ()
    category: str | None = None


def accuracy(
    prompts: Sequence[PromptAnswers], samples: int, ks: Sequence[int], *, resamples: int, seed: int = 0
) -> dict[str, Estimate]:
    """Greedy pass@1 (``GREEDY``), then ``avg@n``, and ``pass@k`` and ``maj@k`` for each k.

    Each is over the prompts that have what it needs.

    Args:
        prompts: what came of each.
        samples: how many were drawn of each prompt (n).
        ks: at most n.
        resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    scores: dict[str, list[float]] = {GREEDY: [float(p.greedy.is_correct) for p in prompts if p.greedy is not None]}
    drawn = [p.samples for p in prompts if p.samples]
    if samples:
        scores[f"avg@{samples}"] = [avg_at_k(answers) for answers in drawn]
    for k in ks:
        scores |= sampled_scores(drawn, k)
    return {name: bootstrap(values, resamples, seed) for name, values in scores.items() if values}


def by_category(
    prompts: Sequence[PromptAnswers], samples: int, ks: Sequence[int], *, resamples: int, seed: int = 0
) -> dict[str, dict[str, Estimate]]:
    """``accuracy`` of each category, in alphabetical order; empty where the dataset has none."""
    names = sorted({prompt.category for prompt in prompts if prompt.category is not None})
    return {
        name: accuracy([p for p in prompts if p.category == name], samples, ks, resamples=resamples, seed=seed)
        for name in names
    }


def lengths(tokens: Sequence[int]) -> dict[str, float]:
    """Mean, median, 95th percentile and maximum of completion lengths in tokens."""
    if not tokens:
        return {}
    values = np.asarray(tokens)
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p95": float(np.quantile(values, 0.95)),
        "max": int(values.max()),
    }
