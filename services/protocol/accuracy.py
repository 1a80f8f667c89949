"""Accuracy: which answers are right, and estimates from them with standard errors and intervals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import comb, hypot, sqrt

from pydantic import BaseModel

from services.protocol.rewards import RewardResult, RewardStatus

CORRECT = 1.0 - 1e-9
"""The lowest reward of a right answer, or the lowest value, before its weight, of the component that decides."""

Z = 1.959964
"""The quantile of the normal distribution for an interval of 95%."""

UNDECIDED = (
    "no part of REWARD_FN says whether an answer is right, so there is no accuracy, no best checkpoint and no "
    "curriculum, and TARGET_ACCURACY is never reached; name the part that does with ACCURACY_FN"
)


def is_judged(result: RewardResult | None) -> bool:
    """Return whether the answer was judged: no service and no agent failed."""
    return result is not None and result.status in (RewardStatus.SCORED, RewardStatus.OVER_LIMIT)


def is_correct(result: RewardResult) -> bool | None:
    """Return whether the answer is right, or None if it was not judged, or if no component says so.

    An answer over a limit is wrong for any reward that training gives it: if it were excluded, a model could raise its
    accuracy by writing answers that cannot be verified.
    """
    if result.status is RewardStatus.OVER_LIMIT:
        return False
    value = result.reward if result.decided_by is None else result.components.get(result.decided_by)
    return None if result.reward is None or value is None else value >= CORRECT


def verdicts(results: Sequence[RewardResult]) -> list[bool]:
    """Return ``is_correct`` of the answers that have it; none where no part of REWARD_FN decides."""
    if any(result.decided_by == "" for result in results):
        return []
    return [right for result in results if (right := is_correct(result)) is not None]


def standard_error(scores: Sequence[float]) -> float:
    """Return the standard error of the mean of ``scores``, one score a prompt: sqrt(sum (s - mean)^2) / n.

    For scores of 0 and 1 this is the binomial sqrt(p (1 - p) / n). For avg@k and pass@k it is clustered by prompt: the
    samples of a prompt depend on each other, so they make one score (Miller 2024, arXiv:2411.00640).

    Raises:
        StatisticsError: there are no scores.
    """
    return statistics.pstdev(scores) / sqrt(len(scores))


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
    """Return the mean of ``scores``, one score from 0 to 1 a prompt, with its ``standard_error`` and 95% interval.

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
    low, high = max(middle - half, 0.0), min(middle + half, 1.0)
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


Metrics = dict[str, Estimate]
"""Estimates by the name of their metric."""
GREEDY = "greedy pass@1"


def accuracy(
    greedy: Sequence[Sequence[RewardResult]], sampled: Sequence[Sequence[RewardResult]], n: int, ks: Sequence[int]
) -> Metrics:
    """Return greedy pass@1 (``GREEDY``), then ``avg@n``, and ``pass@k`` for each k.

    Each metric is over the prompts that have enough judged answers for it; a metric without such a prompt is left out,
    and so are all of them if no part of REWARD_FN says whether an answer is right.

    Args:
        greedy: the results of each prompt's answers at temperature 0.
        sampled: the results of its answers at another temperature.
        n: answers of that kind that each prompt should have.
        ks: each at most ``n``.
    """
    if any(result.decided_by == "" for results in (*greedy, *sampled) for result in results):
        return {}
    judged = [rights for results in sampled if (rights := verdicts(results))]
    scores = {GREEDY: [float(right) for results in greedy for right in verdicts(results)]}
    if n:
        scores[f"avg@{n}"] = [statistics.fmean(rights) for rights in judged]
    for k in ks:
        scores[f"pass@{k}"] = [pass_at_k(len(rights), sum(rights), k) for rights in judged if len(rights) >= k]
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
            error = hypot(*(part.stderr for part in parts)) / len(parts)
            low, high = max(value - Z * error, 0.0), min(value + Z * error, 1.0)
            means[name] = Estimate(value=value, stderr=error, low=low, high=high, prompts=sum(p.prompts for p in parts))
    return means
