"""Estimates of accuracy, for training and for grpo evaluate: right answers, pass@k, standard errors, intervals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import comb, sqrt

from pydantic import BaseModel

from services.protocol.rewards import RewardResult, RewardStatus

CORRECT = 1.0 - 1e-9
"""The lowest reward of a right answer."""

Z = 1.959964
"""The quantile of the normal distribution for an interval of 95%."""


def is_correct(result: RewardResult) -> bool | None:
    """Return whether the answer is right, or None if it was not judged because a service or an agent failed.

    An answer over a limit is wrong, whatever reward training gives it: if it were excluded, a model could raise its
    accuracy by writing answers that cannot be verified.
    """
    if result.status is RewardStatus.OVER_LIMIT:
        return False
    return None if result.reward is None else result.reward >= CORRECT


def standard_error(scores: Sequence[float]) -> float:
    """Return the standard error of the mean of ``scores``, one score a prompt: sqrt(sum (s - mean)^2) / n.

    For scores of 0 and 1 this is the binomial sqrt(p (1 - p) / n). For avg@k and pass@k it is clustered by prompt: the
    samples of a prompt depend on each other, so they make one score (Miller 2024, arXiv:2411.00640).

    Raises:
        StatisticsError: there are no scores.
    """
    return statistics.pstdev(scores) / sqrt(len(scores))


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95% interval of the mean of ``scores``, one score from 0 to 1 a prompt.

    Wilson's score interval (1927), which lies within 0 and 1 and has a width also at 0 and at 1. Scores between 0 and 1
    vary less than right and wrong answers of the same mean. Like as many of those they count as have the same standard
    error: p (1 - p) / stderr^2 (Kish's effective sample size).

    Raises:
        StatisticsError: there are no scores.
    """
    mean, error = statistics.fmean(scores), standard_error(scores)
    n = mean * (1 - mean) / error**2 if error > 0 else len(scores)
    middle = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z * sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
    return max(middle - half, 0.0), min(middle + half, 1.0)


class Estimate(BaseModel):
    """A mean over ``prompts`` prompts with its standard error and the ends of its interval."""

    value: float
    stderr: float
    low: float
    high: float
    prompts: int

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def estimate(scores: Sequence[float]) -> Estimate:
    """Return the mean of ``scores``, one score from 0 to 1 a prompt, with its ``standard_error`` and ``interval``.

    Raises:
        StatisticsError: there are no scores.
    """
    low, high = interval(scores)
    mean, error = statistics.fmean(scores), standard_error(scores)
    return Estimate(value=mean, stderr=error, low=low, high=high, prompts=len(scores))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate, from n samples, of the probability that at least one of k samples is right.

    Chen et al. 2021, arXiv:2107.03374, eq. 1.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= correct <= n.
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {correct} right of {n} samples; needed is 1 <= k <= n")
    return 1.0 - comb(n - correct, k) / comb(n, k)
