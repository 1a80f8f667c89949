"""A test of equivalence: two one-sided t-tests on the difference of two variants, taken seed by seed.

Two variants are equal within a margin if the 90% confidence interval of their mean difference lies between minus and
plus the margin (TOST at the 5% level; Schuirmann 1987, doi:10.1007/BF01068419). The margin is chosen before the data
are seen. An interval that contains 0 alone proves nothing: few seeds make it wide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from benchmarks.results.runs import Result

LEVEL = 0.05
"""The chance of calling two variants equal whose difference is the margin."""


@dataclass(frozen=True)
class Measure:
    """A number of a run by which variants are compared."""

    name: str
    of: Callable[[Result], float | None]
    margin: float
    digits: int
    """Digits behind the point in tables."""
    exact: Callable[[Result], object]
    """Returns what identical runs have in common to the last digit."""


REWARD = Measure("mean reward", lambda result: result.area, 0.02, 3, lambda result: result.rewards)
"""The mean reward over all steps."""
ACCURACY = Measure("accuracy", lambda result: result.accuracy, 0.1, 2, lambda result: result.accuracy)
"""The accuracy on held-out prompts."""


class Verdict(StrEnum):
    """The outcome of a comparison, in the words of the page."""

    IDENTICAL = "identical"
    """The same to the last digit in every seed."""
    EQUAL = "equal"
    """The interval contains 0 and lies within the margin."""
    WITHIN_MARGIN = "equal, within the margin"
    """The interval lies within the margin and excludes 0."""
    HIGHER = "higher"
    """The interval lies above 0 and is not within the margin."""
    LOWER = "lower"
    """The interval lies below 0 and is not within the margin."""
    OPEN = "open"
    """The interval contains 0 and is not within the margin."""


@dataclass(frozen=True)
class Comparison:
    """The mean difference of two variants over the seeds that both have on one processor."""

    seeds: int
    mean: float
    low: float
    """Lower end of the 90% confidence interval."""
    high: float
    margin: float
    is_identical: bool = False
    """True if both have the same numbers to the last digit in every seed."""

    @property
    def verdict(self) -> Verdict:
        """The outcome, by where the interval lies."""
        if self.is_identical:
            return Verdict.IDENTICAL
        excludes_zero = self.low > 0 or self.high < 0
        if -self.margin < self.low and self.high < self.margin:
            return Verdict.WITHIN_MARGIN if excludes_zero else Verdict.EQUAL
        if not excludes_zero:
            return Verdict.OPEN
        return Verdict.HIGHER if self.mean > 0 else Verdict.LOWER

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


def compare(own: Sequence[Result], base: Sequence[Result], measure: Measure) -> Comparison | None:
    """Return how a measure of ``own`` differs from that of ``base``; None with fewer than two common seeds.

    Only runs with the same seed on the same processor are a pair, because processors round sums differently.
    """
    others = {(result.seed, result.processor): result for result in base}
    found = [(result, others.get((result.seed, result.processor))) for result in own]
    pairs = [(result, other) for result, other in found if other is not None]
    numbers = [(measure.of(result), measure.of(other)) for result, other in pairs]
    differences = [a - b for a, b in numbers if a is not None and b is not None]
    count = len(differences)
    if count < 2:
        return None
    mean = statistics.fmean(differences)
    half = t_quantile(1 - LEVEL, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    is_identical = all(measure.exact(result) == measure.exact(other) for result, other in pairs)
    return Comparison(count, mean, mean - half, mean + half, measure.margin, is_identical)


def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, to about four digits.

    With t = sqrt(degrees) tan(a), the density is proportional to cos(a)^(degrees - 1) on -pi/2 < a < pi/2, a finite
    interval over which it is summed.
    """
    angles = np.linspace(-math.pi / 2, math.pi / 2, 200_001)
    middles = (angles[1:] + angles[:-1]) / 2
    below = np.concatenate([[0.0], np.cumsum(np.cos(middles) ** (degrees - 1))])
    return math.sqrt(degrees) * math.tan(float(np.interp(probability, below / below[-1], angles)))
